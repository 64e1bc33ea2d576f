"""A study as text: pure functions from a table of trials to what a person reads."""

from collections.abc import Sequence

from racimo.cli.console import table as text_table
from racimo.cli.render import format_money
from racimo.client.importance import Importance
from racimo.client.trial_table import TrialTable
from racimo.control.views import RunView, TrialView
from racimo.spec.quantity import format_duration
from racimo.spec.study import StudySpec
from racimo.state.nouns import ENDED

STATUS_ORDER = ("finished", "running", "paused", "waiting", "stopped", "diverged", "failed")
NUM_BEST = 5
NUM_TOP = 10
LEAST_ROWS = 12
"""Of a terminal; with fewer only the first lines are shown."""
LEAST_COLOUR_COLUMNS = 40
"""With fewer, lines are cut, which those with colours are not."""
FIXED = ("", "TRIAL", "STATUS", "ROUND")


def short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def values_words(trial: TrialView) -> str:
    """`lr=0.001 layers=2`."""
    return " ".join(f"{name}={short(value)}" for name, value in trial.values.items())


def metrics_words(trial: TrialView, terms: StudySpec) -> str:
    """`loss 0.0123, latency_ms 4`."""
    told = []
    for objective in terms.objectives:
        value = trial.metrics.get(objective.metric)
        told.append(f"{objective.metric} {short(value) if value is not None else 'not told'}")
    return ", ".join(told)


def trial_line(trial: TrialView, terms: StudySpec) -> str:
    """`trial 7 finished: loss 0.0123 after 9 rounds  lr=0.001 layers=2`."""
    rounds = f" after {trial.rounds} round{'' if trial.rounds == 1 else 's'}" if trial.rounds else ""
    why = f": {trial.failure.message}" if trial.failure is not None else f": {metrics_words(trial, terms)}"
    return f"trial {trial.number} {trial.status}{why}{rounds}  {values_words(trial)}"


def counts_words(table: TrialTable) -> str:
    """`42 of 100 trials: 30 finished, 4 running`."""
    counts = table.newest.counts
    told = ", ".join(f"{counts[status]} {status}" for status in STATUS_ORDER if counts.get(status))
    return f"{table.newest.num_trials} of {table.terms.trials} trials" + (f": {told}" if told else "")


def best_words(table: TrialTable) -> str:
    """`loss 0.0123, trial 17 after 9 rounds`; "" before there is one."""
    best = table.best
    if best is None:
        return ""
    rounds = f" after {best.rounds} round{'' if best.rounds == 1 else 's'}" if best.rounds else ""
    return f"{metrics_words(best, table.terms)}, trial {best.number}{rounds}"


def head_words(view: RunView, table: TrialTable) -> str:
    """`digits-1  running  2m 10s of 2h  $0.12 of $20`; where it waits, why."""
    terms = table.terms
    words = [view.id, view.status]
    if view.status not in ENDED and view.status != "running" and view.reason is not None:
        words.append(view.reason.text)
    limit = f" of {format_duration(terms.time_s)}" if terms.time_s is not None else ""
    words.append(format_duration(view.running_s) + limit)
    if view.price_known or terms.money is not None:
        cap = f" of {format_money(terms.money)}" if terms.money is not None else ""
        words.append(format_money(view.cost) + cap)
    return "  ".join(words)


def live_lines(view: RunView, table: TrialTable, columns: int, rows: int, *, colour: bool = False) -> list[str]:
    """What a terminal of that size shows while a study goes on; no line is longer, and there are not more."""
    colour = colour and columns >= LEAST_COLOUR_COLUMNS
    lines = [_cut(line, columns) for line in (head_words(view, table), counts_words(table)) if line]
    if best := best_words(table):
        lines.append(_cut(f"best {best}", columns))
    room = rows - len(lines) - 2
    if rows < LEAST_ROWS or room < 3:
        return lines[:rows]
    best_trials = table.top(NUM_BEST)
    among = {trial.number for trial in best_trials}
    running = [trial for trial in table.running if trial.number not in among]
    left_over = len(best_trials) + len(running) - room
    shown = running if left_over <= 0 else running[: max(0, len(running) - left_over - 1)]
    if not best_trials and not shown:
        return lines
    lines += ["", *trials_table(table, best_trials, columns, colour=colour, then=shown).split("\n")]
    if len(shown) < len(running):
        lines.append(_cut(f"and {len(running) - len(shown)} more running", columns))
    return lines


def trials_table(
    table: TrialTable, ranked: Sequence[TrialView], columns: int, *, colour: bool, then: Sequence[TrialView] = ()
) -> str:
    """The best, numbered, and others below them. Parameters that do not fit are left out, the last ones first."""
    names = list(table.space.parameters)
    metrics = [objective.metric for objective in table.objectives]
    titles = (*FIXED, *(_unlike(metric, FIXED) for metric in metrics), *(f"{name} " for name in names), "")
    rows = [
        (
            f"{place}." if place else "",
            str(trial.number),
            trial.status,
            _rounds(trial, table.terms),
            *(short(trial.metrics[metric]) if metric in trial.metrics else "" for metric in metrics),
            *(short(trial.values[name]) if name in trial.values else "" for name in names),
            "",
        )
        for place, trial in [*enumerate(ranked, 1), *((0, trial) for trial in then)]
    ]
    optional = (*(f"{name} " for name in reversed(names)), "STATUS", *titles[5 : 4 + len(metrics)])
    text = text_table(
        titles, rows, columns=columns, colour=colour, right=("TRIAL", "ROUND", *titles[4 : 4 + len(metrics)]),
        optional=optional,
    )  # fmt: skip
    return text if colour else "\n".join(_cut(line, columns) for line in text.split("\n"))


def study_page(table: TrialTable, found: Sequence[Importance], columns: int, *, colour: bool) -> list[str]:
    """What `racimo show` says of a study: counts, the best, what mattered, and the best trials or the front."""
    lines = ["", f"study: {', '.join(str(objective) for objective in table.objectives)}"]
    lines.append(f"  trials      {counts_words(table)}")
    if best := table.best:
        lines.append(f"  best        {best_words(table)}")
        lines.append(f"              {values_words(best)}")
    if importance := importance_words(found):
        lines.append(f"  importance  {importance}")
    failed = [trial for trial in table.trials.values() if trial.failure is not None]
    if failed:
        first = min(failed, key=lambda trial: trial.number)
        assert first.failure is not None
        lines.append(f"  failed      trial {first.number}: {first.failure.message} [{first.failure.code}]")
    front = table.front if len(table.objectives) > 1 else []
    top = front[:NUM_TOP] or table.top(NUM_TOP)
    if top:
        title = f"the front, {len(front)} trials" if front else "best trials"
        lines += ["", title, trials_table(table, top, columns, colour=colour)]
    return lines


def importance_words(found: Sequence[Importance]) -> str:
    """`lr 62%, layers 30%`; "" where nothing is known."""
    return ", ".join(f"{one.name} {one.share:.0%}" for one in found if one.share is not None)


def _rounds(trial: TrialView, terms: StudySpec) -> str:
    if not trial.rounds and trial.status == "waiting":
        return ""
    return f"{trial.rounds}/{terms.rounds}" if terms.rounds else str(trial.rounds)


def _unlike(name: str, taken: Sequence[str]) -> str:
    return f"{name} " if name in taken else name


def _cut(text: str, columns: int) -> str:
    return text if len(text) <= columns else text[: max(0, columns - 1)] + "…"
