"""A tune run as it goes on, until it ends. Ctrl-C ends the watching, never the run."""

import sys
import time

from racimo.cli.console import has_colour, is_terminal, talk, write, write_json
from racimo.cli.live_block import LiveBlock
from racimo.cli.render import failure_lines
from racimo.cli.study_words import live_lines, trial_line
from racimo.client.api import Client
from racimo.client.reading import all_reports
from racimo.client.trial_table import TrialTable
from racimo.control.views import RunView, TrialView
from racimo.spec.errors import ExitCode
from racimo.state.nouns import ENDED

WAIT_S = 1.0
"""At most, for news; the time that passes is shown all the same."""
REDRAW_S = 0.2
"""At least between two looks: trials may end by the hundred a second."""


def follow_study(client: Client, view: RunView, *, as_json: bool = False, quiet: bool = False) -> int:
    """A table on a terminal, elsewhere a line for each trial that is over; the command's exit code."""
    assert view.spec.study is not None
    table = TrialTable(view.spec.study)
    block = LiveBlock(sys.stderr) if is_terminal(sys.stderr) and not quiet else None
    num_heard = 0
    try:
        while True:
            began_s = time.monotonic()
            view = client.run(view.id)
            over = view.status in ENDED
            assert view.spec.study is not None
            if view.spec.study != table.terms:
                table = table.under(view.spec.study)
            changed = table.take(client.trials(view.id, table.newest.seq, 0.0 if over else WAIT_S))
            if block is not None:
                reports = all_reports(client, view.id, num_heard)
                num_heard += len(reports)
                table.hear(reports)
                _draw(block, view, table, changed)
            elif not quiet:
                _tell(table, changed)
            if over:
                break
            time.sleep(max(0.0, REDRAW_S - (time.monotonic() - began_s)))  # news are kept for the next look
    except KeyboardInterrupt:
        talk(come_back(view.id))
        return int(ExitCode.INTERRUPTED)
    return _end(view, table, as_json)


def come_back(run: str) -> str:
    return (
        f"{run} goes on without you\n  come back:  racimo show -f {run}\n"
        f"  more of it: racimo tune --extend {run} --trials COUNT\n  end it:     racimo stop {run}"
    )


def _draw(block: LiveBlock, view: RunView, table: TrialTable, changed: list[TrialView]) -> None:
    columns, rows = block.size
    failed = [f"racimo: {trial_line(trial, table.terms)}" for trial in changed if trial.status == "failed"]
    lines = live_lines(view, table, columns, rows, colour=has_colour(sys.stderr))
    block.show(lines, above=[line[: columns - 1] for line in failed])


def _tell(table: TrialTable, changed: list[TrialView]) -> None:
    for trial in changed:
        if trial.status not in ("waiting", "running"):
            talk(trial_line(trial, table.terms))


def _end(view: RunView, table: TrialTable, as_json: bool) -> int:
    if as_json:
        write_json(view)
    elif table.best is not None:
        write(" ".join(f"{name}={value}" for name, value in table.best.values.items()))
    if view.reason is not None:
        talk(f"{view.id} {view.status}: {view.reason.text}")
    if view.status == "succeeded":
        talk(f"look at it: racimo show {view.id} --picture {view.id}.html")
        return int(ExitCode.OK)
    if view.failure is not None:
        print("\n".join(failure_lines(view.failure)), file=sys.stderr)
    return int(ExitCode.RUN_FAILED)
