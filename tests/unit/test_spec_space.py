"""Spaces: what people may write, what is refused and in which words, and the points that come out."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from racimo.spec.space import Parameter, Space, differences, key_of, parse_parameter


def space(**parameters: object) -> Space:
    return Space(parameters={name: parse_parameter(written) for name, written in parameters.items()})


@pytest.mark.parametrize(
    ("written", "kind", "low", "high", "log", "step"),
    [
        ("0.1..0.9", "float", 0.1, 0.9, False, 0),
        ("log 1e-5..1e-1", "float", 1e-5, 1e-1, True, 0),
        ("1..8", "int", 1, 8, False, 0),
        ("32..256 step 32", "int", 32, 256, False, 32),
        ("log 16..512", "int", 16, 512, True, 0),
        ("-1.5 .. 2", "float", -1.5, 2, False, 0),
        ("0..1 step 0.25", "float", 0, 1, False, 0.25),
    ],
)
def test_a_range_is_written_as_text(written: str, kind: str, low: float, high: float, log: bool, step: float) -> None:
    found = parse_parameter(written)
    assert (found.kind, found.low, found.high, found.log, found.step) == (kind, low, high, log, step)


@pytest.mark.parametrize(
    ("written", "words"),
    [
        ("0.9..0.1", "from the lower to the higher"),
        ("log 0..1", "begins above 0"),
        ("log 1..8 step 2", "a log range has none"),
        ("1e400..2", "finite"),
        ("one to eight", "a range such as"),
        ([], "at least one"),
        (["a", "b", "a"], "twice"),
        ([1, 1.0], "twice"),
        ({"is": "1..2", "if": {}}, "`is` and `when`"),
        ([[1, 2]], "choices are texts"),
        (float("nan"), "finite"),
    ],
)
def test_what_is_no_parameter_is_said_in_words(written: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_parameter(written)


def test_true_one_and_the_text_one_are_different_choices() -> None:
    assert parse_parameter([True, 1, "1", None]).num_values == 4


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({}, "empty"),
        ({"a": {"is": "0..1", "when": {"b": 1}}}, "no other parameter"),
        ({"a": {"is": "0..1", "when": {"b": 7}}, "b": "1..3"}, "which it never is"),
        ({"a": {"is": "0..1", "when": {"b": 0}}, "b": {"is": "0..1", "when": {"a": 1}}}, "circle"),
        ({"a b": "0..1"}, "named with letters"),
    ],
)
def test_a_space_that_cannot_be_is_refused(parameters: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        space(**parameters)


def test_a_condition_may_stand_before_what_it_names() -> None:
    found = space(beta={"is": "0.9..0.99", "when": {"optimizer": ["adam", "lamb"]}}, optimizer=["sgd", "adam", "lamb"])
    assert list(found.parameters) == ["optimizer", "beta"]
    assert set(found.at([0.0, 0.5])) == {"optimizer"}
    assert set(found.at([0.5, 0.5])) == {"optimizer", "beta"}


def test_a_contradictory_constraint_is_met_by_no_point_and_a_wrong_name_is_refused() -> None:
    both = Space(parameters={"a": parse_parameter("1..4")}, constraints=("a > 3", "a < 2"))
    assert all(both.broken_constraint({"a": value}) for value in range(1, 5))
    with pytest.raises(ValueError, match="names b"):
        Space(parameters={"a": parse_parameter("1..4")}, constraints=("b > 3",))


@pytest.mark.parametrize(
    ("point", "words"),
    [
        ({"a": 1}, "b is missing"),
        ({"a": 1, "b": "x", "c": 1}, "no parameter c"),
        ({"a": 9, "b": "x"}, "not within 1..4"),
        ({"a": 1.5, "b": "x"}, "not a whole number"),
        ({"a": True, "b": "x"}, "not a number"),
        ({"a": 1, "b": "z"}, "none of"),
        ({"a": 4, "b": "x"}, "breaks the constraint a < 4"),
    ],
)
def test_a_point_that_a_person_names_is_checked(point: dict[str, object], words: str) -> None:
    found = Space(parameters={"a": parse_parameter("1..4"), "b": parse_parameter(["x", "y"])}, constraints=("a < 4",))
    with pytest.raises(ValueError, match=words):
        found.complete(point)  # type: ignore[arg-type]


def test_the_grid_has_every_point_once_and_counts_conditions() -> None:
    found = space(a="1..3", b={"is": ["x", "y"], "when": {"a": [2, 3]}}, c="0..1 step 0.5")
    assert found.num_points == (1 + 2 + 2) * 3
    points = {key_of(found.grid_point(index)) for index in range(found.num_points)}
    assert len(points) == found.num_points
    with pytest.raises(IndexError):
        found.grid_point(found.num_points)
    assert space(a="0.0..1.0").num_points is None


def test_a_changed_space_is_shown_as_a_difference() -> None:
    before, after = space(a="1..3", b="0.0..1.0"), space(a="1..4", c=["x"])
    assert differences(before, after) == ["a: 1..3 -> 1..4", "b: 0.0..1.0 -> none", "c: none -> [x]"]
    assert differences(before, before) == []


RANGES = st.one_of(
    st.tuples(st.integers(-50, 50), st.integers(0, 100)).map(
        lambda r: Parameter(kind="int", low=r[0], high=r[0] + r[1])
    ),
    st.tuples(st.integers(1, 50), st.integers(0, 100)).map(
        lambda r: Parameter(kind="int", low=r[0], high=r[0] + r[1], log=True)
    ),
    st.tuples(st.floats(-1e6, 1e6), st.floats(0, 1e6)).map(
        lambda r: Parameter(kind="float", low=r[0], high=r[0] + r[1])
    ),
    st.tuples(st.floats(1e-9, 1e3), st.floats(1.001, 1e6)).map(
        lambda r: Parameter(kind="float", low=r[0], high=r[0] * r[1], log=True)
    ),
    st.lists(st.integers(), min_size=1, max_size=9, unique=True).map(
        lambda c: Parameter(kind="choice", choices=tuple(c))
    ),
)


@given(RANGES, st.floats(0, 1, exclude_max=True))
def test_every_position_gives_a_value_that_is_allowed(parameter: Parameter, unit: float) -> None:
    assert parameter.refuse(parameter.at(unit)) == ""


@given(RANGES, st.floats(0, 1, exclude_max=True))
def test_the_position_of_a_value_gives_the_value_again(parameter: Parameter, unit: float) -> None:
    value = parameter.at(unit)
    if parameter.kind == "choice":
        assert parameter.at(parameter.unit_of(value)) == value
    elif parameter.kind == "float":
        again = parameter.at(min(parameter.unit_of(value), 1 - 2**-53))
        assert math.isclose(again, value, rel_tol=1e-6, abs_tol=1e-6 * (parameter.high - parameter.low))  # type: ignore[arg-type]
