"""What the command line shows, as golden files: rendered from fixed views, so that a change of a screen is seen."""

import time
from collections.abc import Callable

import msgspec
import pytest
from fixed_views import (
    CLUSTER,
    DRAINING_NODE,
    EVENTS,
    FAILED,
    FAILURE,
    FINDINGS,
    FINDINGS_HERE,
    NODE,
    PROGRESS,
    SILENT_NODE,
    TRAINING,
    WAITING,
)

from racimo.cli import console, render
from racimo.cli.check import check_lines
from racimo.cli.main import COMMANDS, load, make_parser, overview
from racimo.cli.service import cluster_lines
from racimo.spec.errors import RacimoError

Golden = Callable[[str, str], None]


@pytest.fixture(autouse=True)
def _fixed_surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()


def test_the_overview_lists_every_command(golden: Golden) -> None:
    text = overview()
    golden("screens/help.txt", text)
    assert all(f"  {name}" in text for name in COMMANDS)


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_has_its_help(name: str, golden: Golden) -> None:
    add_arguments, _ = load(name)
    parser = make_parser(name)
    add_arguments(parser)
    golden(f"screens/help-{name}.txt", parser.format_help())


@pytest.mark.parametrize("columns", [60, 80, 120, console.WIDE])
def test_ps_fits_the_terminal(columns: int, golden: Golden) -> None:
    rows = [render.ps_row(view) for view in (WAITING, FAILED, TRAINING)]
    text = console.table(
        render.PS_TITLES,
        rows,
        columns=columns,
        colour=False,
        right=render.PS_RIGHT,
        optional=render.PS_OPTIONAL,
    )
    golden(f"screens/ps-{columns}.txt", text)
    assert all(len(line) <= columns for line in text.splitlines())


def test_where_no_price_is_set_there_are_no_costs_to_be_seen() -> None:
    titles, row = render.without_cost(render.PS_TITLES), render.without_cost(render.ps_row(WAITING))
    assert "COST" not in titles and len(row) == len(titles) and row[-1] == render.ps_row(WAITING)[-1]


def test_an_ended_run_has_no_workers_and_no_time_left() -> None:
    words = render.progress_words(msgspec.structs.replace(PROGRESS, status="succeeded", remaining_s=0.0))
    assert "worker" not in words and "left" not in words


def test_ps_has_colour_only_when_asked() -> None:
    rows = [render.ps_row(FAILED)]
    assert "\x1b[" in console.table(render.PS_TITLES, rows, columns=120, colour=True)
    assert "\x1b[" not in console.table(render.PS_TITLES, rows, columns=120, colour=False)


@pytest.mark.parametrize("view", [TRAINING, WAITING, FAILED], ids=lambda view: view.status)
def test_show_is_all_about_one_run(view: object, golden: Golden) -> None:
    golden(f"screens/show-{view.status}.txt", "\n".join(render.run_page(view)))  # type: ignore[attr-defined]


def test_why_prints_the_reason_and_its_numbers(golden: Golden) -> None:
    assert WAITING.reason is not None
    golden("screens/why.txt", "\n".join(render.reason_lines(WAITING.reason)))


def test_events_are_one_line_each(golden: Golden) -> None:
    golden("screens/events.txt", "\n".join(render.event_line(record) for record in EVENTS))


def test_a_failure_begins_with_the_first_traceback_and_counts_the_others(golden: Golden) -> None:
    lines = render.failure_lines(FAILURE)
    golden("screens/failure.txt", "\n".join(lines))
    assert lines[0].startswith("Traceback") and "2 others failed too" in lines


@pytest.mark.parametrize("columns", [60, 80, 120, console.WIDE])
def test_nodes_with_their_state_and_why_fit_the_terminal(columns: int, golden: Golden) -> None:
    rows = [render.node_row(view) for view in (NODE, SILENT_NODE, DRAINING_NODE)]
    text = console.table(
        render.NODE_TITLES,
        rows,
        columns=columns,
        colour=False,
        right=render.NODE_RIGHT,
        optional=render.NODE_OPTIONAL,
    )
    golden(f"screens/nodes-{columns}.txt", text)
    assert all(len(line) <= columns for line in text.splitlines())


def test_what_check_finds_here_on_nodes_and_between_them(golden: Golden) -> None:
    golden("screens/check.txt", "\n".join(check_lines(FINDINGS_HERE, FINDINGS, colour=False)))


def test_nodes_and_processes(golden: Golden) -> None:
    nodes = console.table(render.NODE_TITLES, [render.node_row(NODE)], columns=120, colour=False)
    rows = [render.process_row(usage) for usage in CLUSTER.processes]
    processes = console.table(render.PROCESS_TITLES, rows, columns=120, colour=False, right=render.PROCESS_TITLES[1:])
    golden("screens/nodes.txt", f"{nodes}\n\n{processes}")


def test_up_says_where(golden: Golden) -> None:
    golden("screens/up.txt", "\n".join(cluster_lines(CLUSTER)))


def test_a_price_of_zero_is_never_shown_as_a_cost() -> None:
    """skypilot#6680."""
    assert render.ps_row(FAILED)[render.PS_TITLES.index("COST")] == "-"
    assert "$" not in render.cost_words(FAILED)
    assert "$" not in render.progress_words(PROGRESS, price_known=False)


def test_the_live_line(golden: Golden) -> None:
    waiting = msgspec.structs.replace(PROGRESS, step=0, loss=None, tokens_per_s=None, remaining_s=None)
    samples = msgspec.structs.replace(PROGRESS, tokens_per_s=None, samples_per_s=88.0, num_workers=1)
    lines = [render.progress_words(progress) for progress in (PROGRESS, waiting, samples)]
    lines.append(render.progress_words(PROGRESS, price_known=False))
    golden("screens/live-line.txt", "\n".join(lines))


def test_how_a_training_run_ended(golden: Golden) -> None:
    ended = msgspec.structs.replace(TRAINING, status="succeeded")
    free = msgspec.structs.replace(ended, price_known=False, progress=None)
    golden("screens/ended.txt", "\n".join("  ".join(render.ended_words(view)) for view in (ended, free)))


def test_errors_have_code_and_hint(golden: Golden) -> None:
    errors = [
        RacimoError("unreachable", "no cluster answers at http://127.0.0.1:1: refused", "racimo up"),
        RacimoError("can-never-fit", "asked for 9 devices, the cluster has 4", "racimo train train.py --workers 4"),
        RacimoError("syntax-error", '  File "t.py", line 1\n    def\n       ^\nSyntaxError: invalid syntax'),
    ]
    golden("screens/errors.txt", "\n\n".join("\n".join(console.error_lines(error)) for error in errors))


def test_leaving_says_how_to_come_back_and_how_to_end_it(golden: Golden) -> None:
    """skypilot#402, skypilot#756: people fear Ctrl-C because they do not know what it kills."""
    golden("screens/ctrl-c.txt", render.come_back("gpt-3"))
