"""Everything that happens, as frozen values: the only things that enter the journal.

*Facts* came from outside: a user asked, a worker exited. *Intents* are what `decide` concluded; they are journalled
before anything is done about them, so after a crash the same things are done again, and each doing is idempotent.
Old journals must stay readable: fields are only added, always with a default, and names never change.
"""

from typing import Literal

import msgspec

from racimo.spec.run import RunSpec
from racimo.spec.study import StudySpec
from racimo.state.nouns import Exit, Failure, Node, Placement, Reason
from racimo.state.trials import Grant, Proposal, Result


class _Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="event", tag=True):
    pass


# Facts: what users asked


class RunSubmitted(_Event, frozen=True, kw_only=True):
    run: str
    spec: RunSpec
    request: str
    """The client's idempotency key: the same request submitted twice is one run."""
    wall_s: float


class StopRequested(_Event, frozen=True, kw_only=True):
    run: str


class PauseRequested(_Event, frozen=True, kw_only=True):
    """`until`: the user's `resume`, or the cluster's next `up` where the cluster itself is taken down."""

    run: str
    until: Literal["resume", "up"] = "resume"


class ResumeRequested(_Event, frozen=True, kw_only=True):
    run: str


class ScaleRequested(_Event, frozen=True, kw_only=True):
    run: str
    least: int
    most: int


# Facts: what nodes and workers did


class NodeJoined(_Event, frozen=True, kw_only=True):
    """A node came, or came back with other properties."""

    node: Node


class NodeSilent(_Event, frozen=True, kw_only=True):
    node: str


class NodeStuck(_Event, frozen=True, kw_only=True):
    """A worker elsewhere (`witness`) waits for one on this silent node: it is not only its agent that is gone."""

    node: str
    witness: str


class DrainRequested(_Event, frozen=True, kw_only=True):
    """`deadline_s`: seconds from now after which what still runs there is stopped. `undo`: it takes work again."""

    node: str
    deadline_s: float | None = None
    undo: bool = False


class NodeForgotten(_Event, frozen=True, kw_only=True):
    """The node left, or a person vouches (`confirmed_dead`) that nothing runs there any more."""

    node: str
    confirmed_dead: bool = False


class PairUnreachable(_Event, frozen=True, kw_only=True):
    """Worker `index` cannot reach worker `other` of its attempt, though both their nodes answer."""

    run: str
    attempt: int
    index: int
    other: int


class JournalCut(_Event, frozen=True, kw_only=True):
    """Durable records are lost: names that they gave must not be given again. `newest_run`: the highest run number that
    a node still knows, 0 if the loss was found otherwise."""

    newest_run: int = 0


class WorkerStarted(_Event, frozen=True, kw_only=True):
    run: str
    attempt: int
    index: int
    pid: int


class WorkerReady(_Event, frozen=True, kw_only=True):
    """The worker entered `run.steps`: from here on the attempt is elastic. `address`: where its peers reach it.
    Told again with `holds` once it has committed a step as one of those that compute."""

    run: str
    attempt: int
    index: int
    address: str
    micro_shards: int
    numerics: str
    holds: bool = False


class WorkerExited(_Event, frozen=True, kw_only=True):
    run: str
    attempt: int
    index: int
    exit: Exit
    commits: int = 0
    """The newest step committed by the run when it died, as its agent knew it; tells progress from a crash loop."""


class WorkerHung(_Event, frozen=True, kw_only=True):
    """No change of phase for too long; `failure` names rank, line and who waits."""

    run: str
    attempt: int
    index: int
    failure: Failure


class SliceEnded(_Event, frozen=True, kw_only=True):
    """A slice of a trial is over: `number` is its grant's. Said once by the agent of its worker, whatever becomes of
    that worker afterwards."""

    run: str
    attempt: int
    index: int
    number: int
    result: Result


class TrialsProposed(_Event, frozen=True, kw_only=True):
    """New trials, numbered on from the ones that there are. `first`: the number of the first, so that the same
    proposals told twice are trials once. `exhausted`: the proposer has no further point. `failure`: it has failed, and
    with it the study."""

    run: str
    first: int
    proposals: tuple[Proposal, ...]
    exhausted: bool = False
    failure: Failure | None = None


class StudyChanged(_Event, frozen=True, kw_only=True):
    """A person changed what the study looks for, or how long: it goes on under the new terms from here on."""

    run: str
    study: StudySpec


# Intents


class SliceGranted(_Event, frozen=True, kw_only=True):
    """A worker of the present attempt runs a trial for a while."""

    run: str
    attempt: int
    grant: Grant
    reason: Reason


class TrialEnded(_Event, frozen=True, kw_only=True):
    """A trial that runs no slice is given up, or has had all its rounds."""

    run: str
    trial: int
    status: Literal["finished", "stopped", "failed"]
    reason: Reason


class NodeLost(_Event, frozen=True, kw_only=True):
    """A silent node is given up. Its workers of exact runs count as gone (`WorkersLost` follows)."""

    node: str
    reason: Reason


class WorkersLost(_Event, frozen=True, kw_only=True):
    """Workers whose node cannot be reached count as ended in an unknown way; should they still live, they are fenced:
    by their generation (exact runs) or because the lease on their node has ended (all others)."""

    run: str
    attempt: int
    indices: tuple[int, ...]
    reason: Reason


class AttemptPlanned(_Event, frozen=True, kw_only=True):
    """A new attempt begins: these workers, on these devices. The attempt's number fences all earlier ones."""

    run: str
    attempt: int
    placements: tuple[Placement, ...]
    reason: Reason


class WorkersPlanned(_Event, frozen=True, kw_only=True):
    """More workers for a running elastic attempt: a replacement, or growth."""

    run: str
    attempt: int
    placements: tuple[Placement, ...]
    reason: Reason


class WorkersLeaving(_Event, frozen=True, kw_only=True):
    """These workers are to end. stop: SIGTERM, then SIGKILL after the spec's grace. pause: commit, save, leave.
    release: leave at the next generation. abort: SIGKILL at once."""

    run: str
    attempt: int
    indices: tuple[int, ...]
    how: Literal["stop", "pause", "release", "abort"]
    reason: Reason
    failure: Failure | None = None
    """Set where this ends the attempt in a way that its own workers' ends would not tell."""


class GenerationAnnounced(_Event, frozen=True, kw_only=True):
    run: str
    attempt: int
    number: int
    members: tuple[int, ...]
    reason: Reason


class RunRequeued(_Event, frozen=True, kw_only=True):
    """The attempt is over and another will follow when its turn comes (a retry, a crash of all workers, a resume)."""

    run: str
    reason: Reason
    retry: bool = False


class RunPaused(_Event, frozen=True, kw_only=True):
    run: str
    reason: Reason


class RunEnded(_Event, frozen=True, kw_only=True):
    run: str
    status: Literal["succeeded", "failed", "stopped", "lost"]
    reason: Reason
    failure: Failure | None = None


class RunForgotten(_Event, frozen=True, kw_only=True):
    """An old ended run is dropped from the state, and nodes drop what they keep of it (not its outputs)."""

    run: str
    reason: Reason


Fact = (
    RunSubmitted
    | StopRequested
    | PauseRequested
    | ResumeRequested
    | ScaleRequested
    | NodeJoined
    | NodeSilent
    | NodeStuck
    | DrainRequested
    | NodeForgotten
    | PairUnreachable
    | JournalCut
    | WorkerStarted
    | WorkerReady
    | WorkerExited
    | WorkerHung
    | SliceEnded
    | TrialsProposed
    | StudyChanged
)
Intent = (
    NodeLost
    | WorkersLost
    | AttemptPlanned
    | WorkersPlanned
    | WorkersLeaving
    | GenerationAnnounced
    | RunRequeued
    | RunPaused
    | RunEnded
    | RunForgotten
    | TrialsProposed
    | SliceGranted
    | TrialEnded
)
Event = Fact | Intent


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the journal. `seq` is the order of everything; `at_s` the cluster's clock; `wall_s` for people."""

    seq: int
    at_s: float
    wall_s: float
    event: Event
