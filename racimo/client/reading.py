"""Reading whole studies and all reports through a `Client`, and following them into a tracker."""

import time
from typing import TYPE_CHECKING

from racimo.agent.protocol import Report
from racimo.client.trackers import Tracker, run_series, trial_series
from racimo.client.trial_table import TrialTable
from racimo.control.views import RunView
from racimo.spec.errors import RacimoError
from racimo.state.nouns import ENDED

if TYPE_CHECKING:
    from racimo.client.api import Client


def trial_table(client: "Client", view: RunView) -> TrialTable:
    """All trials as they are now. `RacimoError`: `wrong-state` for what is no tune run."""
    if view.spec.study is None:
        raise RacimoError("wrong-state", f"{view.id} is a {view.kind} run: it has no trials", f"racimo show {view.id}")
    table = TrialTable(view.spec.study)
    table.take(client.trials(view.id))
    return table


def all_reports(client: "Client", run: str, after: int = 0) -> list[Report]:
    """From number `after` on."""
    reports: list[Report] = []
    while True:
        batch = client.reports(run, after)
        reports += batch.reports
        if batch.next == after:
            return reports
        after = batch.next


def follow_into(client: "Client", view: RunView, tracker: Tracker, *, until_ended: bool, look_s: float) -> int:
    """Tells a tracker of a run or of its trials; with `until_ended` again and again until it has ended. How many."""
    if view.spec.study is not None:
        return _follow_trials(client, view, tracker, until_ended, look_s)
    reports: list[Report] = []
    while True:
        view = client.run(view.id)  # first: of a run that has ended, all reports are there
        reports += all_reports(client, view.id, len(reports))
        tracker.put(run_series(view, reports))
        if not until_ended or view.status in ENDED:
            return 1
        # Reports make no event that could be awaited.
        time.sleep(look_s)


def _follow_trials(client: "Client", view: RunView, tracker: Tracker, until_ended: bool, look_s: float) -> int:
    assert view.spec.study is not None
    table = TrialTable(view.spec.study)
    reports: dict[int, list[Report]] = {}
    num_heard = 0
    while True:
        view = client.run(view.id)
        over = view.status in ENDED or not until_ended
        answer = client.trials(view.id, table.newest.seq, 0.0 if over else look_s)
        table.take(answer)
        heard = all_reports(client, view.id, num_heard)
        num_heard += len(heard)
        changed = {trial.number for trial in answer.trials}
        for report in heard:
            if report.trial is not None:
                reports.setdefault(report.trial, []).append(report)
                changed.add(report.trial)
        # The last time all: those that wait or are paused end with the run.
        for number in sorted(set(table.trials) if over else changed & set(table.trials)):
            if number in reports or table.trials[number].failure is not None:
                tracker.put(trial_series(view, table.trials[number], reports.get(number, [])))
        if over:
            return sum(1 for trial in table.trials.values() if trial.number in reports or trial.failure is not None)
