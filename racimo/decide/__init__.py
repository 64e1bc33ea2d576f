"""What should be: pure functions from the state and the time to intents, each with its Reason."""

from racimo.decide.decision import Decisions
from racimo.decide.plan import decide

__all__ = ["Decisions", "decide"]
