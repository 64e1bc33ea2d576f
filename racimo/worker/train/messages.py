"""What the members of a generation say to each other.

On one machine a message is one packet of a `SOCK_SEQPACKET` socket, perhaps with a descriptor; between machines a frame
of a TCP connection, perhaps with a payload behind it (`stream.py`)."""

import msgspec

MAX_PACKET_BYTES = 160 * 1024
"""Below the kernel's default send buffer (208 KiB), in which one packet must fit."""


class _Packet(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type", tag=True):
    pass


class Hello(_Packet, frozen=True, kw_only=True):
    """First packet of either side; the sender's arena (a memfd) comes with it."""

    run: str
    attempt: int
    generation: int
    worker: str
    slot_bytes: int


class Holding(msgspec.Struct, frozen=True, kw_only=True):
    """A block of the tree that the sender has computed, and where: a slot of its arena.

    `used` is a bitmap of the parameters that got a gradient."""

    level: int
    index: int
    slot: int
    leaves: tuple[int, ...]
    weight: float
    weighted_loss: float
    num_samples: int
    used: bytes


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """All there is to know about a reduced step except its gradient; the same bits on every member."""

    step: int
    generation: int
    weight: float
    loss: float
    num_samples: int
    used: bytes
    pause: bool
    contributions: dict[str, tuple[int, ...]]
    """Worker index (as text) to the micro-shards that it contributed."""
    save: bool = False
    """A checkpoint is taken after this step; all send a checksum of that state with the next."""
    enters: tuple[int, ...] = ()
    """Ranks of that generation that have caught up: from the next step on they compute and sum like all others."""


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """What makes two workers, or a checkpoint and a worker, the same run.

    `parameters` is a count and a digest of names and shapes."""

    micro_shards: int
    seed: int
    global_batch_size: int
    dataset_size: int
    parameters: str
    coherence: str


class Declare(_Packet, frozen=True, kw_only=True):
    """Where the sender stands when a generation begins. `step`: steps committed; `fresh`: it has no state yet.

    `last` describes the step before; `gives`: the sender still holds its gradient. `given`: it was given its state and
    has committed nothing since. `untouched`: nothing was done yet with the state it has. `reaches`: the step to which
    one that trails can bring itself, else -1. `shelf`: the precedence of the newest checkpoint that a fresh one has;
    (-1, -1) if none."""

    round: int
    step: int
    fresh: bool
    untouched: bool = False
    reaches: int = -1
    shelf: tuple[int, int] = (-1, -1)
    identity: Identity
    numerics: str
    holdings: tuple[Holding, ...] = ()
    last: Outcome | None = None
    gives: bool = False
    given: bool = False

    def answers(self, other: "Declare") -> bool:
        return self.round == other.round


class Contribution(_Packet, frozen=True, kw_only=True):
    """The sender's blocks of this step are complete and stay untouched until every member has sent `Summed`.

    `active`: the ranks that sum a part each. Between machines the receiver's part of every block follows.
    `enters`: the lead's proposal of those that are counted on from the next step, each with the commits that it has.
    `left_out`: by rank of one that trails, the last step whose gradient the sender left out for it."""

    step: int
    holdings: tuple[Holding, ...]
    active: tuple[int, ...]
    pause: bool = False
    save: bool = False
    checksum: int | None = None
    enters: dict[int, int] = {}
    left_out: dict[int, int] = {}


class Summed(_Packet, frozen=True, kw_only=True):
    """The sender's part of the gradient is in its `reduced` slot, to be copied; between machines it follows."""

    step: int
    active: tuple[int, ...]


class Gradient(_Packet, frozen=True, kw_only=True):
    """The whole reduced gradient, which follows, for one on another machine that is a commit behind."""

    step: int


class Reduced(_Packet, frozen=True, kw_only=True):
    """The sender's part, the `position`th of `num_parts`, of a step's gradient, for one that trails. It follows, or
    lies in the memfd that comes along; 0 parts: it was left out. One of the senders says the `outcome`."""

    step: int
    position: int
    num_parts: int
    outcome: Outcome | None = None


class Near(_Packet, frozen=True, kw_only=True):
    """One that trails has caught up but for a step or so: it may be counted on."""

    step: int


class Again(_Packet, frozen=True, kw_only=True):
    """One that trails has lost the thread and needs the state anew; `halt`: and all are to wait until it has it."""

    step: int
    halt: bool = False


class StateOffer(_Packet, frozen=True, kw_only=True):
    """The whole training state in the memfd that comes with it: `head_bytes` of pickle, then tensors. Between machines
    it follows in `Piece`s."""

    step: int
    head_bytes: int
    size_bytes: int
    last: Outcome | None = None


class Piece(_Packet, frozen=True, kw_only=True):
    """Some of the state that was offered last, from `offset` on."""

    offset: int


class Compared(_Packet, frozen=True, kw_only=True):
    """The sender's model after the last commit, before it says `Done`."""

    step: int
    checksum: int


class Done(_Packet, frozen=True, kw_only=True):
    """The sender has committed all steps and needs nothing any more."""

    step: int


class Left(_Packet, frozen=True, kw_only=True):
    """The sender's loop was left (break, return or an exception) after this many commits."""

    step: int


Packet = (
    Hello | Declare | Contribution | Summed | Gradient | Reduced | Near | Again | StateOffer | Piece
    | Compared | Done | Left
)  # fmt: skip

encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Packet).decode
