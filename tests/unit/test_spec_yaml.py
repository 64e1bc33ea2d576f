"""A spec as YAML: the same fields as everywhere, and errors that name line and field."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from racimo.spec.build import FieldError, build_spec
from racimo.spec.errors import RacimoError
from racimo.spec.run import CheckpointSpec, RunSpec
from racimo.spec.yaml import format_spec, parse_spec


def test_the_example_of_the_documentation_is_read() -> None:
    text = """
name: llama-sft
train: train.py
args: [--lr, 3e-4, --steps, 100]
workers: 2..4
priority: normal
files: .
checkpoint: {to: s3://bucket/llama, every: 10m}
"""
    assert parse_spec(text) == RunSpec(
        name="llama-sft",
        train="train.py",
        args=("--lr", "3e-4", "--steps", "100"),
        workers="2..4",
        checkpoint=CheckpointSpec(to="s3://bucket/llama", every="10m"),
    )


def test_numbers_and_words_mean_what_people_who_train_models_mean() -> None:
    spec = parse_spec(
        "train: t.py:f\nconfig: {lr: 3e-4, steps: 10, mode: on, country: no, half: .5, ratio: 1:30, none: ~}"
    )
    assert spec.config == {
        "lr": 3e-4, "steps": 10, "mode": "on", "country": "no", "half": 0.5, "ratio": "1:30", "none": None,
    }  # fmt: skip


def test_text_stays_as_written() -> None:
    spec = parse_spec("command: [echo, 007, 1.50, yes]\nvariables: {A: 010, B: true}\nname: 123")
    assert spec.command == ("echo", "007", "1.50", "yes")
    assert spec.variables == {"A": "010", "B": "true"}
    assert spec.name == "123"


def test_a_command_may_be_one_string() -> None:
    assert parse_spec("command: python train.py --name 'two words'").command == (
        "python",
        "train.py",
        "--name",
        "two words",
    )


@pytest.mark.parametrize(
    ("text", "said", "hint"),
    [
        ("train: x.py\nworker: 2", "s.yaml line 2: unknown field worker", "did you mean workers?"),
        ("train: x.py\n\ncheckpoint:\n  evry: 3m", "s.yaml line 4: unknown field checkpoint.evry", "checkpoint.every"),
        ("train: x.py\nbudget: $200", "s.yaml line 2: unknown field budget", "known fields: name, train,"),
        ("train: x.py\nretries: often", "s.yaml line 2: retries: expected int, got str", ""),
        ("train: x.py\nworkers: 4..2", "s.yaml line 2: workers are a count or a range", ""),
        ("train: x.py\ntrain: y.py", "s.yaml line 2: train stands already in line 1", ""),
        ("train: x.py\npriority: urgent", "s.yaml line 2: ", ""),
        ("train: [", "s.yaml line 1: ", ""),
        ("- train: x.py", "s.yaml is not a mapping", ""),
        ("", "s.yaml is not a mapping", ""),
        ("train: !!python/object/apply:os.system [echo]", "s.yaml line 1: ", ""),
        ("train: x.py\ncommand: echo", "exactly one of train, tune and command", ""),
        ("snapshot: abc\ntrain: x.py", "unknown field snapshot", ""),
    ],
)
def test_an_error_names_line_and_field(text: str, said: str, hint: str) -> None:
    with pytest.raises(RacimoError) as caught:
        parse_spec(text, source="s.yaml")
    assert caught.value.code == "invalid-spec"
    assert said in caught.value.message
    assert hint in caught.value.hint


def test_flags_go_over_the_file_entry_by_entry() -> None:
    text = "train: t.py:f\nworkers: 2\nconfig: {lr: 1.0, steps: 5}"
    spec = parse_spec(text, overrides={"workers": "3", "config": {"lr": 2.0}})
    assert spec.workers == "3"
    assert spec.config == {"lr": 2.0, "steps": 5}


def test_python_keywords_are_checked_like_the_file() -> None:
    assert build_spec({"train": "t.py", "workers": 2, "checkpoint": {"keep": 3}}).checkpoint.keep == 3
    with pytest.raises(FieldError, match="unknown field wrkers") as caught:
        build_spec({"train": "t.py", "wrkers": 2})
    assert caught.value.hint == "did you mean workers?"


words = st.text(st.characters(min_codepoint=32, max_codepoint=0x2FF, exclude_characters="\x7f"), max_size=12)


@settings(max_examples=60, deadline=None)
@given(
    args=st.lists(words, max_size=4),
    config=st.dictionaries(words, st.one_of(st.integers(-(10**6), 10**6), words, st.booleans(), st.none()), max_size=4),
    variables=st.dictionaries(st.text("AB_", min_size=1, max_size=4), words, max_size=3),
    workers=st.sampled_from([1, "2", "2..4"]),
    keep=st.integers(1, 5),
)
def test_what_is_written_is_read_back(args, config, variables, workers, keep) -> None:  # type: ignore[no-untyped-def]
    spec = RunSpec(
        train="t.py:f",
        args=tuple(args),
        config=config,
        variables=variables,
        workers=workers,
        checkpoint=CheckpointSpec(keep=keep),
    )
    assert parse_spec(format_spec(spec)) == spec


@pytest.mark.parametrize("checkpoint", ["{every: 0 steps}", "{to: 'memory://x'}"])
def test_checkpoints_that_could_not_be_are_refused(checkpoint: str) -> None:
    with pytest.raises(RacimoError, match=r"from 1 step up|memory://"):
        parse_spec(f"train: x.py\ncheckpoint: {checkpoint}\n")
