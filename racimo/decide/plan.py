"""The one decision: every open run looked at, in order, against the devices that are free."""

from racimo.decide.decision import Decisions
from racimo.state.fold import State


def decide(state: State, now_s: float, seed: int) -> Decisions:
    """What is to happen next. Applying the intents and deciding again converges; without news it adds nothing."""
    return Decisions()
