"""The members of one generation, and what each of them does in it."""

from collections.abc import Callable, Sequence

from racimo.agent.protocol import NewGeneration
from racimo.state.nouns import parse_worker_id
from racimo.worker.train.address import parse_address
from racimo.worker.train.messages import Outcome
from racimo.worker.train.wire import Peer

Waiting = Callable[[tuple[int, ...]], None]
"""Is told the indices of the workers that are waited for, once a wait has become long."""


class Regroup(Exception):
    """The generation is over, or cannot go on: settle with the next one."""


class Mesh:
    """The connections of one generation. `settled` once its members agreed on where they stand.

    `active`: the ranks that compute and sum; the others trail. Empty before it is settled."""

    def __init__(self, generation: NewGeneration, me: str) -> None:
        self.generation = generation
        self.number = generation.number
        self.members = tuple(member.worker for member in generation.members)
        self.addresses = tuple(parse_address(member.address) for member in generation.members)
        self.rank = self.members.index(me)
        self.peers: dict[int, Peer] = {}
        self.round = 0
        self.settled = False
        self.active: tuple[int, ...] = ()
        self.began_at = 0
        """Commits of the active members when it was settled."""
        self.left_out: dict[int, int] = {}
        """By rank of one that trails: the last step whose gradient I left out for it."""

    @property
    def size(self) -> int:
        return len(self.members)

    @property
    def lead(self) -> int:
        """The active rank that does what one has to do for all."""
        return self.active[0] if self.active else 0

    @property
    def second(self) -> int | None:
        """The first active rank on another machine than the lead."""
        node = self.addresses[self.lead].node
        return next((rank for rank in self.active if self.addresses[rank].node != node), None)

    @property
    def trailing(self) -> list[int]:
        return [rank for rank in range(self.size) if rank not in self.active]

    def enter(self, outcome: Outcome) -> None:
        """From the next step on those count that were agreed on with this one."""
        if outcome.generation == self.number:
            self.active = tuple(sorted({*self.active, *outcome.enters}))

    def goes_on_in(self, newer: NewGeneration) -> bool:
        """Whether a later generation only adds members."""
        return {member.worker for member in newer.members}.issuperset(self.members)

    @property
    def trails(self) -> bool:
        return self.settled and self.rank not in self.active

    @property
    def others(self) -> list[int]:
        """The active ranks but mine."""
        return [rank for rank in self.active if rank != self.rank]

    def index_of(self, rank: int) -> int:
        return parse_worker_id(self.members[rank])[2]

    def nearest(self, rank: int, among: Sequence[int]) -> int:
        """Of some ranks the first on the same machine as `rank`, else the first."""
        node = self.addresses[rank].node
        return next((other for other in among if self.addresses[other].node == node), among[0])
