"""A tune run as it goes on, until it ends. Ctrl-C ends the watching, never the run."""

import sys

from racimo.cli.console import talk, write, write_json
from racimo.cli.render import come_back, failure_lines
from racimo.client.api import Client
from racimo.control.views import RunView, StudyView, TrialView
from racimo.spec.errors import ExitCode
from racimo.spec.study import Objective, StudySpec
from racimo.state.nouns import ENDED

WAIT_S = 1.0


def follow_study(client: Client, view: RunView, *, as_json: bool = False, quiet: bool = False) -> int:
    """Shows trials as they end, and a table on a terminal; the command's exit code."""
    terms = view.spec.study
    assert terms is not None
    trials: dict[int, TrialView] = {}
    after = -1
    try:
        while True:
            study = client.trials(view.id, after, WAIT_S)
            after = study.seq
            ended = [trial for trial in study.trials if _news(trials.get(trial.number), trial)]
            trials |= {trial.number: trial for trial in study.trials}
            if not quiet:
                for trial in ended:
                    talk(trial_line(trial, terms))
            view = client.run(view.id)
            if view.status in ENDED:
                break
    except KeyboardInterrupt:
        talk(come_back(view.id))
        return int(ExitCode.INTERRUPTED)
    return _end(view, trials, study, terms, as_json)


def _news(before: TrialView | None, after: TrialView) -> bool:
    return after.status not in ("waiting", "running") and (before is None or before.status != after.status)


def _end(view: RunView, trials: dict[int, TrialView], study: StudyView, terms: StudySpec, as_json: bool) -> int:
    if as_json:
        write_json(view)
    elif study.best is not None:
        best = trials[study.best]
        write(" ".join(f"{name}={value}" for name, value in best.values.items()))
    if view.reason is not None:
        talk(f"{view.id} {view.status}: {view.reason.text}")
    if view.status == "succeeded":
        return int(ExitCode.OK)
    if view.failure is not None:
        for line in failure_lines(view.failure):
            print(line, file=sys.stderr)
    return int(ExitCode.RUN_FAILED)


def trial_line(trial: TrialView, terms: StudySpec) -> str:
    """`trial 7 finished: loss 0.0123 after 9 rounds  lr=0.001 layers=2`."""
    told = ", ".join(_metric_words(objective, trial) for objective in terms.objectives)
    values = " ".join(f"{name}={_short(value)}" for name, value in trial.values.items())
    rounds = f" after {trial.rounds} round{'' if trial.rounds == 1 else 's'}" if trial.rounds else ""
    return f"trial {trial.number} {trial.status}: {told}{rounds}  {values}"


def _metric_words(objective: Objective, trial: TrialView) -> str:
    value = trial.metrics.get(objective.metric)
    return f"{objective.metric} {_short(value) if value is not None else 'not told'}"


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
