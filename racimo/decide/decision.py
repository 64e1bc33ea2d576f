"""What a decision is: intents to journal and carry out, why each waiting run waits, and when to look again."""

import msgspec

from racimo.state.events import Intent
from racimo.state.nouns import Reason


class Decisions(msgspec.Struct, frozen=True, kw_only=True):
    """`waits`: for every run that does not get what it asked for now, why (of nodes that are away `Away.why` tells,
    with the time as of its asking). `next_due_s`: when time alone may change something, on the cluster's clock; None
    where only an event can."""

    intents: tuple[Intent, ...] = ()
    waits: dict[str, Reason] = {}
    next_due_s: float | None = None
    wants: dict[str, int] = {}
    """By tune run, how many trials its proposer is to propose before a free worker can go on."""
