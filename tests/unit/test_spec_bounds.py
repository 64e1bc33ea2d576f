"""What no run can have is refused where the spec is made, with the field's name and in text that can be shown."""

from typing import Any

import msgspec
import pytest

from racimo.spec.build import FieldError, build_spec
from racimo.spec.errors import RacimoError


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"name": "abc\n"}, "a name is up to 40"),
        ({"variables": {"A B": "1"}}, "'A B'"),
        ({"variables": {"1A": "1"}}, "'1A'"),
        ({"variables": {"": "1"}}, "''"),
        ({"variables": {"A\n": "1"}}, r"'A\n'"),
        ({"variables": {"A": "x\0y"}}, "NUL"),
        ({"variables": {"A": "\udcff"}}, r"variables holds '\udcff', which is not UTF-8"),
        ({"command": ["echo", "\udcff"]}, r"command holds '\udcff', which is not UTF-8"),
        ({"command": ["true"], "files": "a\udcff"}, r"files holds 'a\udcff'"),
        ({"seed": -1}, "seed is from 0 to 9223372036854775807"),
        ({"seed": 2**63}, "seed"),
        ({"threads": 0}, "threads are from 1 to 1024, not 0"),
        ({"threads": 1025}, "threads are from 1 to 1024, not 1025"),
    ],
)
def test_what_no_run_can_have_is_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(FieldError) as caught:
        build_spec({"command": ["true"], **fields})
    assert said in caught.value.message


def test_a_nested_config_value_that_is_no_utf_8_is_refused() -> None:
    with pytest.raises(FieldError, match="config holds"):
        build_spec({"train": "t.py:f", "config": {"a": [{"b": "\udcff"}]}})


def test_the_bounds_themselves_are_taken() -> None:
    spec = build_spec({"command": ["true"], "seed": 2**63 - 1, "threads": 1024, "variables": {"_a1": "ü\n"}})
    assert (spec.seed, spec.threads) == (2**63 - 1, 1024)


def test_an_error_that_names_an_odd_byte_can_be_sent() -> None:
    error = RacimoError("file-missing", "there is no bad\udcff.txt", "ls bad\udcff.txt")
    assert msgspec.json.encode([error.message, error.hint, str(error)])
    assert error.message == r"there is no bad\udcff.txt"
