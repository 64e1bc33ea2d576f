"""What is kept of the past: the newest ended runs. The journal keeps all of them, outputs stay where they are."""

from racimo.state.events import RunForgotten
from racimo.state.fold import State
from racimo.state.nouns import Reason

MAX_ENDED_RUNS = 1_000
MAX_FORGOTTEN_AT_ONCE = 100


def forget(state: State, max_ended: int = MAX_ENDED_RUNS) -> list[RunForgotten]:
    """The oldest ended runs beyond `max_ended`, whose files, logs and records the nodes may drop."""
    excess = len(state.runs) - len(state.open_runs) - max_ended
    if excess <= 0:
        return []
    ended = (run for run in state.runs.values() if run.ended and not run.live_workers)
    reason = Reason(code="forgotten", text=f"more than {max_ended} runs have ended since", counts={"kept": max_ended})
    return [
        RunForgotten(run=run.id, reason=reason)
        for run, _ in zip(ended, range(min(excess, MAX_FORGOTTEN_AT_ONCE)), strict=False)
    ]
