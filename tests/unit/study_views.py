"""Studies as a client sees them, made up from a formula, for the tests of what shows them."""

import math
from collections.abc import Callable, Mapping

from racimo.client.trial_table import TrialTable
from racimo.control.views import RunView, StudyView, TrialView
from racimo.spec.run import RunSpec
from racimo.spec.space import Scalar
from racimo.spec.study import StudySpec
from racimo.state.nouns import Failure, Reason

SPACE = {"lr": "log 1e-4..1e-1", "width": "8..64 step 8", "optimizer": ["sgd", "adam"],
         "beta": {"is": "0.5..0.99", "when": {"optimizer": "adam"}}}  # fmt: skip
TERMS = StudySpec(space=SPACE, metric="loss", trials=100, rounds=9)


def trial(number: int, values: Mapping[str, Scalar] | None = None, **fields: object) -> TrialView:
    """One that is finished, with loss 0.5, unless said otherwise."""
    base: dict[str, object] = {
        "number": number,
        "status": "finished",
        "values": dict(values or {"lr": 0.01, "width": 32, "optimizer": "sgd"}),
        "by": "random",
        "rounds": 9,
        "metrics": {"loss": 0.5},
        "device_s": 2.0,
    }
    return TrialView(**(base | fields))  # type: ignore[arg-type]


def failed(number: int) -> TrialView:
    failure = Failure(code="worker-raised", message="ValueError: width is odd")
    return trial(number, status="failed", metrics={}, rounds=0, failure=failure)


def table_of(*trials: TrialView, terms: StudySpec = TERMS) -> TrialTable:
    table = TrialTable(terms)
    counts: dict[str, int] = {}
    for one in trials:
        counts[one.status] = counts.get(one.status, 0) + 1
    view = StudyView(seq=7, counts=counts, num_trials=len(trials), trials=trials)
    table.take(view)
    best = table.top(1)
    table.take(StudyView(seq=7, counts=counts, num_trials=len(trials), best=best[0].number if best else None))
    return table


def drawn(count: int, loss: Callable[[Mapping[str, Scalar]], float], terms: StudySpec = TERMS) -> TrialTable:
    """`count` trials spread over the space, with curves, and the loss of a formula."""
    trials = []
    for number in range(count):
        units = [math.modf((number + 1) * part)[0] for part in (0.6180339887, 0.7548776662, 0.5698402910, 0.8191725134)]
        values = terms.parsed_space.at(units[: len(terms.space)])
        value = loss(values)
        curve = tuple((round, value + 1.0 / round) for round in range(1, 10))
        trials.append(trial(number, values, metrics={"loss": value + 1 / 9}, curve=curve))
    return table_of(*trials, terms=terms)


def run_view(status: str = "running", **fields: object) -> RunView:
    base: dict[str, object] = {
        "id": "digits-1",
        "kind": "tune",
        "status": status,
        "spec": RunSpec(tune="train.py:train", study=TERMS),
        "reason": Reason(code=status, text="4 workers run trials"),
        "submitted_wall_s": 1_700_000_000.0,
        "running_s": 130.0,
        "cost": 0.1234,
        "price_known": True,
    }
    return RunView(**(base | fields))  # type: ignore[arg-type]
