"""The cables of the simulated cluster: which agents the head hears, and which hosts reach each other."""

from collections.abc import Callable
from typing import Literal

from racimo.sim.timeline import Timeline

LINK_TIMEOUT_S = 2.5
"""A connection of which one direction is dead is given up by TCP after this time, and then both are."""

Cut = Literal["both", "to agent", "from agent"]


class SimNetwork:
    """`head` is the host of the control process. `on_change` is told of every cut and every healing."""

    def __init__(self, timeline: Timeline, head: str) -> None:
        self._timeline = timeline
        self.head = head
        self._hosts: set[str] = set()
        """Hosts whose cable is out: they reach nobody."""
        self._links: dict[str, tuple[Cut, float]] = {}
        """Only the way between head and agent, and since when."""
        self._pairs: set[frozenset[str]] = set()
        self.on_change: Callable[[], None] = lambda: None

    def cut_host(self, host: str) -> None:
        self._hosts.add(host)
        self.on_change()

    def cut_link(self, host: str, how: Cut) -> None:
        self._links[host] = (how, self._timeline.now_s())
        self.on_change()
        self._timeline.after(LINK_TIMEOUT_S, self.on_change)

    def cut_pair(self, one: str, other: str) -> None:
        self._pairs.add(frozenset((one, other)))
        self.on_change()

    def heal(self, host: str) -> None:
        """Cable and link of that host."""
        self._hosts.discard(host)
        self._links.pop(host, None)
        self.on_change()

    def heal_pair(self, one: str, other: str) -> None:
        self._pairs.discard(frozenset((one, other)))
        self.on_change()

    @property
    def whole(self) -> bool:
        return not (self._hosts or self._links or self._pairs)

    def to_agent(self, host: str) -> bool:
        """Whether what control sends arrives there."""
        return self._link(host, "to agent")

    def from_agent(self, host: str) -> bool:
        """Whether what the agent sends arrives at the head."""
        return self._link(host, "from agent")

    def reaches(self, one: str, other: str) -> bool:
        """Whether workers of these hosts reach each other."""
        if one == other:
            return True
        return not ({one, other} & self._hosts) and frozenset((one, other)) not in self._pairs

    def _link(self, host: str, direction: Cut) -> bool:
        if host == self.head:
            return True
        if {host, self.head} & self._hosts:
            return False
        how, since_s = self._links.get(host, ("", 0.0))
        if not how:
            return True
        timed_out = self._timeline.now_s() - since_s >= LINK_TIMEOUT_S
        return how not in ("both", direction) and not timed_out
