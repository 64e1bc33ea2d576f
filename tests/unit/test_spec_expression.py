"""Constraints are arithmetic and comparisons, and nothing can be reached from them."""

import pytest

from racimo.spec.expression import Expression

KNOWN = ("a", "b", "model.width", "name")


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("a * b <= 6", True),
        ("a * b < 6", False),
        ("1 < a < 3 < b + 1", True),
        ("not a > 2 and (b == 3 or b == 4)", True),
        ("model.width % 64 == 0", True),
        ("name == 'sgd'", True),
        ("name != 'sgd' or a ** 2 == 4", True),
        ("a / (b - 3) > 0", False),
        ("name * 3 == 'sgdsgdsgd'", False),
        ("10 ** 400 > 1", False),
    ],
)
def test_a_condition_is_computed(text: str, holds: bool) -> None:
    values = {"a": 2, "b": 3, "model.width": 128, "name": "sgd"}
    assert Expression(text, KNOWN).holds(values) is holds


@pytest.mark.parametrize(
    "text",
    ["", "a", "a + b", "a = 3", "__import__('os').system('true') == 0", "[a][0] == 1", "(lambda: 1)() == 1",
     "a.__class__ == 1 and f(a)", "{a} == {1}", "a if b else a", "a < " + "(" * 100 + "1" + ")" * 100 + " < f()"],
)  # fmt: skip
def test_what_is_no_condition_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        Expression(text, KNOWN)


def test_a_dotted_name_is_a_name_and_no_attribute() -> None:
    with pytest.raises(ValueError, match=r"a\.__class__"):
        Expression("a.__class__ == 1", KNOWN)
