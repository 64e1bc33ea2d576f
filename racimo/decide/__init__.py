"""What should be: pure functions from the state, the time and a seed to intents, each with its Reason."""

from racimo.decide.decision import Decisions
from racimo.decide.plan import decide

__all__ = ["Decisions", "decide"]
