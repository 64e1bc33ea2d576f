"""The words and tables about studies: they fit any terminal, and change as a whole."""

import io
import math
import re

import msgspec
import pytest
from study_views import TERMS, drawn, failed, run_view, table_of, trial

from racimo.cli import live_block
from racimo.cli.compare import Row, compare_table
from racimo.cli.extend import changed_terms, term_differences
from racimo.cli.live_block import LiveBlock
from racimo.cli.main import load, make_parser
from racimo.cli.render import ps_row
from racimo.cli.study import come_back
from racimo.cli.study_words import live_lines, study_page, trial_line
from racimo.cli.submit import make_spec
from racimo.cli.usage import UsageError
from racimo.client.importance import importance
from racimo.control.views import StudyProgress
from racimo.spec.errors import RacimoError
from racimo.spec.run import RunSpec
from racimo.spec.study import StudySpec


def some_table():  # type: ignore[no-untyped-def]
    running = [trial(100 + i, status="running", metrics={}, rounds=0) for i in range(30)]
    return table_of(*drawn(40, lambda values: float(values["lr"])).trials.values(), *running, failed(200))  # type: ignore[arg-type]


@pytest.mark.parametrize("columns", [10, 20, 37, 60, 80, 120, 300])
@pytest.mark.parametrize("rows", [5, 11, 12, 24, 60])
def test_the_live_table_fits_any_terminal(columns: int, rows: int) -> None:
    lines = live_lines(run_view(), some_table(), columns, rows)
    assert len(lines) <= rows
    assert max(len(line) for line in lines) <= columns


def test_the_live_table_shows_the_best_five_and_says_how_many_more_run() -> None:
    text = "\n".join(live_lines(run_view(), some_table(), 120, 24))
    assert "71 of 100 trials: 40 finished, 30 running, 1 failed" in text
    assert "5." in text and "6." not in text
    assert re.search(r"and \d+ more running", text)
    assert "$0.1234" in text and "best loss" in text


def test_colours_do_not_change_what_stands_in_the_table() -> None:
    plain = live_lines(run_view(), some_table(), 100, 24)
    coloured = live_lines(run_view(), some_table(), 100, 24, colour=True)
    assert [re.sub(r"\x1b\[\d+m", "", line).rstrip() for line in coloured] == plain


def test_before_the_first_trial_there_are_two_lines_and_the_reason_why_it_waits() -> None:
    lines = live_lines(run_view("queued"), table_of(), 100, 24)
    assert len(lines) == 2 and "4 workers run trials" in lines[0]


class Terminal:
    """As much of one as it takes: what a person would see after each write."""

    def __init__(self, columns: int) -> None:
        self.columns, self.lines, self.row, self.writes = columns, [""], 0, 0

    def write(self, text: str) -> None:
        self.writes += 1
        for part in re.findall(r"\x1b\[[?0-9;]*[A-Za-z]|\n|\r|[^\x1b\n\r]+", text):
            self._take(part)

    def _take(self, part: str) -> None:
        if part == "\n":
            self.row += 1
            if self.row == len(self.lines):
                self.lines.append("")
        elif part.endswith("F") and part.startswith("\x1b"):
            self.row -= int(part[2:-1])
            assert self.row >= 0
        elif part == "\x1b[J":
            self.lines[self.row :] = [""]
        elif not part.startswith("\x1b") and part != "\r":
            self.lines[self.row] = part

    def flush(self) -> None:
        pass


def test_the_block_is_replaced_in_one_write_and_what_is_above_it_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal(80)
    block = LiveBlock(terminal)  # type: ignore[arg-type]
    monkeypatch.setattr(LiveBlock, "size", property(lambda self: (79, 23)))
    block.show(["a", "b", "c"])
    block.show(["d"], above=["trial 7 failed"])
    block.show(["e", "f"])
    assert terminal.lines == ["trial 7 failed", "e", "f", ""]
    assert terminal.writes == 3


def test_lines_that_a_narrower_terminal_has_wrapped_are_taken_back_too(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    block = LiveBlock(stream)
    block.show(["x" * 70, "y"])
    monkeypatch.setattr(LiveBlock, "size", property(lambda self: (29, 23)))
    stream.truncate(0)
    block.show(["z"])
    assert "\x1b[4F" in stream.getvalue()
    assert live_block.BELOW in stream.getvalue()


def test_a_failed_trial_says_why_in_its_line() -> None:
    assert trial_line(failed(3), TERMS).startswith("trial 3 failed: ValueError: width is odd")
    assert trial_line(trial(4), TERMS).startswith("trial 4 finished: loss 0.5 after 9 rounds  lr=0.01")


def test_the_page_of_a_study_has_its_best_what_mattered_and_the_first_failure() -> None:
    table = some_table()
    text = "\n".join(study_page(table, importance(table), 100, colour=False))
    assert "importance  " in text and "best trials" in text and "[worker-raised]" in text
    assert all(len(line) <= 100 for line in text.split("\n")[6:])


def test_ps_shows_trials_and_the_best_value_and_names_what_is_no_loss() -> None:
    """A person looks for the best value first."""
    view = run_view(study=StudyProgress(num_begun=42, most=100, metric="accuracy", best=0.98765))
    assert ps_row(view)[4:6] == ("42/100", "accuracy 0.9877")
    loss = run_view(study=StudyProgress(num_begun=0, most=100, metric="loss"))
    assert ps_row(loss)[4:6] == ("0/100", "")


def test_leaving_a_study_says_how_to_come_back_to_it() -> None:
    """skypilot#402."""
    assert "racimo show -f digits-1" in come_back("digits-1")


SPEC = RunSpec(
    tune="t.py:train", study=msgspec.structs.replace(TERMS, defaults={"lr": 0.01, "width": 8, "optimizer": "sgd"})
)


def test_extending_keeps_what_is_not_named_and_shows_what_changes() -> None:
    assert SPEC.study is not None
    terms = changed_terms(SPEC, {"trials": 200, "space": {"lr": "log 1e-4..1e-1", "depth": "1..4"}, "defaults": {}})
    assert terms.trials == 200 and set(terms.space) == {"lr", "width", "optimizer", "beta", "depth"}
    lines = term_differences(SPEC.study, terms)
    assert "trials: 100 -> 200" in lines and "depth: none -> 1..4" in lines
    assert not any(line.startswith("lr") for line in lines)


def test_a_parameter_can_be_left_out_and_goes_from_the_defaults_too() -> None:
    terms = changed_terms(SPEC, {}, ["width"])
    assert "width" not in terms.space and "width" not in terms.defaults
    with pytest.raises(RacimoError, match="there is no parameter depth"):
        changed_terms(SPEC, {}, ["depth"])


def test_a_file_replaces_all_terms() -> None:
    terms = changed_terms(SPEC, {"space": {"x": "0.0..1.0"}, "metric": "loss"}, whole=True)
    assert set(terms.space) == {"x"} and not terms.defaults and terms.rounds == 0


def test_terms_that_cannot_be_are_refused_by_name() -> None:
    with pytest.raises(RacimoError) as caught:
        changed_terms(SPEC, {"trials": 0})
    assert caught.value.code == "invalid-spec" and "study.trials" in caught.value.message


def test_every_field_of_a_study_has_its_flag() -> None:
    parser = make_parser("tune")
    load("tune")[0](parser)
    options = set(parser.option_strings())
    odd = {
        "defaults": "default",
        "points": "point",
        "retries": "trial-retries",
        "constraints": "constraint",
        "limits": "limit",
    }
    for field in StudySpec.__struct_fields__:
        assert f"--{odd.get(field, field.replace('_', '-'))}" in options, field


def test_points_and_what_a_trial_may_do_are_flags_too() -> None:
    parser = make_parser("tune")
    load("tune")[0](parser)
    words = "t.py:train --metric loss --space x=1..9 --space o=[sgd,adam] --fresh --trial-retries 0 --config steps=7"
    spec, _ = make_spec(parser.read([*words.split(), "--point", "x=3 o=sgd", "--point", "x=4 o=adam"]))
    assert spec.study is not None and spec.config == {"steps": 7}
    assert spec.study.points == ({"x": 3, "o": "sgd"}, {"x": 4, "o": "adam"})
    assert spec.study.fresh and spec.study.retries == 0


def test_extend_takes_no_other_function() -> None:
    parser = make_parser("tune")
    arguments, execute = load("tune")
    arguments(parser)
    with pytest.raises(UsageError, match="own function"):
        execute(parser.read(["--extend", "digits-1", "other.py:train"]))
    parser = make_parser("tune")
    arguments(parser)
    with pytest.raises(UsageError, match="own function"):
        execute(parser.read(["other.py:train", "--extend", "digits-1"]))


@pytest.mark.parametrize("columns", [40, 60, 80, 120])
def test_the_comparison_fits_the_terminal(columns: int) -> None:
    rows = [
        Row(study=f"digits-{i}", status="succeeded", metric="min loss", num_trials=100, best=0.1 * i or None, trial=i,
            found_after_s=12.0, device_s=3600.0, cost=1.5, proposer="quasi-random", scheduler="freeze-thaw")
        for i in range(3)
    ]  # fmt: skip
    text = compare_table(rows, columns=columns, colour=False)
    assert all(len(line) <= columns for line in text.split("\n"))
    assert "digits-2" in text and "MIN LOSS" in text


def test_a_value_that_is_not_finite_is_no_best_value() -> None:
    table = table_of(trial(0, metrics={"loss": math.inf}), trial(1, metrics={"loss": math.nan}, status="diverged"))
    assert len(live_lines(run_view(), table, 80, 24)) == 2
