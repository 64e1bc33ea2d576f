"""Every message between the control process, the agents and the workers of their nodes.

Framing: a 4-byte big-endian length, then a msgpack map. On an agent's Unix socket the first frame says who connects
(`ControlHello` or `WorkerHello`). Control sends a `Request` (id and body) and gets one `Reply` with the same id;
several may be in flight. A worker's connection carries one-way messages both ways.

An agent on another machine dials the control process instead (TLS, ALPN `LINK_ALPN`): it begins with `LinkHello`, is
answered with `LinkAccepted` or `Refused`, and from then on answers requests as on its socket, with a `Beat` now and
then between the replies.
"""

import struct
from typing import Any, Literal

import msgspec

from racimo.agent.propose_protocol import AskProposer, Proposed, ProposerAsk
from racimo.spec.run import CheckpointSpec
from racimo.state.events import SliceEnded, WorkerExited, WorkerHung, WorkerReady, WorkerStarted
from racimo.state.nouns import Node
from racimo.state.trials import Grant, Result, Values

MAX_FRAME_BYTES = 64 * 2**20
LINK_ALPN = "racimo-link"
FRAME_HEADER = struct.Struct(">I")


class _Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type", tag=True):
    pass


# What a worker is to be


class FileEntry(msgspec.Struct, frozen=True):
    """One file of a snapshot: path below its root with `/`, permission bits, size and SHA-256 of the content."""

    path: str
    mode: int
    size_bytes: int
    sha256: str


class WorkerOrder(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """All an agent needs to start one worker. The same order may come twice; `worker` is its name, `run/attempt/index`.

    `secrets` are put into the worker's environment and never written to disk.
    `exec_of` names the worker beside which an `exec` command runs (same folder and environment).
    """

    worker: str
    kind: Literal["command", "train", "tune", "exec"]
    command: tuple[str, ...] = ()
    train_file: str = ""
    train_function: str = ""
    args: tuple[str, ...] = ()
    config: dict[str, Any] = {}
    files: tuple[FileEntry, ...] = ()
    requirements: str = ""
    variables: dict[str, str] = {}
    secrets: dict[str, str] = {}
    devices: tuple[int, ...] = ()
    shares: int = 1
    """So many workers of the run share each of these devices."""
    threads: int = 1
    memory_bytes: int | None = None
    rank: int = 0
    world_size: int = 1
    restart_count: int = 0
    max_restarts: int = 0
    rendezvous_key: str = ""
    """The agent picks one MASTER_PORT per key and keeps to it: `run/attempt`."""
    master_address: str = ""
    """Where rank 0 is, if the attempt's workers are on several nodes; then `master_port` is given too."""
    master_port: int = 0
    local_rank: int | None = None
    """torchrun's LOCAL_RANK, GROUP_RANK and so on, where the attempt spans nodes; else they follow from `rank`."""
    local_world_size: int = 1
    group_rank: int = 0
    group_world_size: int = 1
    least: int = 1
    most: int = 1
    seed: int = 0
    hang_after_s: float = 60.0
    checkpoint: CheckpointSpec = CheckpointSpec()
    paid_s: float = 0.0
    """For how many seconds it may have its devices, until a slice pays for more; 0: no limit."""
    fresh: bool = False
    """Of a tune run: a process for each trial."""
    exec_of: str = ""


class WorkerContext(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker knows of itself: JSON in the file that its environment variable `RACIMO_WORKER` names."""

    worker: str
    run: str
    attempt: int
    index: int
    rank: int
    world_size: int
    least: int
    most: int
    seed: int
    threads: int
    devices: tuple[int, ...]
    directory: str
    """The worker's own folder: logs, `steps.jsonl`, `exit.json`."""
    output_dir: str
    checkpoint: CheckpointSpec
    agent_socket: str
    node: str
    host: str
    reachable: bool = False
    """The node has an address on the network between nodes: a `Reachable` comes as soon as the agent is told."""


# Control to agent


class ControlHello(_Message, frozen=True, kw_only=True):
    cluster: str
    protocol: int


class WorkerState(msgspec.Struct, frozen=True, kw_only=True):
    worker: str
    pid: int | None
    exited: bool


class LinkHello(_Message, frozen=True, kw_only=True):
    """An agent introduces itself to the control process. `wall_s` is its clock, to be compared."""

    token: str
    cluster: str
    """The id of the cluster that it joined; "" the first time."""
    protocol: int
    wall_s: float
    welcome: "ControlWelcome"


class LinkAccepted(_Message, frozen=True, kw_only=True):
    """`beat_busy_s`, `beat_idle_s`: how often to beat with and without live workers."""

    cluster: str
    version: str
    beat_busy_s: float = 0.5
    beat_idle_s: float = 0.5


class Wait(msgspec.Struct, frozen=True, kw_only=True):
    """A worker waits for others of its run. `unreachable`: those among them to whom it cannot (re)connect."""

    worker: str
    waits_for: tuple[int, ...]
    for_s: float
    unreachable: tuple[int, ...] = ()


class Beat(_Message, frozen=True, kw_only=True):
    """A sign of life from agent to control, in between replies; one comes at once when `waits` changes. The next one
    follows within `next_s`."""

    number: int
    waits: tuple[Wait, ...] = ()
    next_s: float = 0.5


class ControlWelcome(_Message, frozen=True, kw_only=True):
    """`instance` changes whenever the agent starts anew. `workers`: all whose exit is not yet acknowledged."""

    node: Node
    instance: str
    workers: tuple[WorkerState, ...]
    warnings: tuple[str, ...] = ()
    """What a person should know of this node now, such as a zygote that is still importing torch."""
    newest_run: int = 0
    """The highest number among the runs (`NAME-NUMBER`) of which the node has kept anything."""


class StartWorker(_Message, frozen=True, kw_only=True):
    order: WorkerOrder


class StartReply(_Message, frozen=True, kw_only=True):
    """`missing`: contents to be sent with `PutBlob` before the same `StartWorker` is sent again.

    Nothing was started if any are."""

    missing: tuple[str, ...] = ()


class PutBlob(_Message, frozen=True, kw_only=True):
    sha256: str
    content: bytes


class PutBlobPart(_Message, frozen=True, kw_only=True):
    """A piece of a large content; it is complete, and verified, once `total_bytes` are there. Pieces come in order."""

    sha256: str
    offset: int
    total_bytes: int
    content: bytes


class PeerAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Where a node's agent serves other agents, and the certificate that it shows there."""

    node: str
    address: str
    port: int
    pin: str


class FetchBlobs(_Message, frozen=True, kw_only=True):
    """Get these contents from another node's agent (a file's wait for them to arrive there included)."""

    source: PeerAddress
    sha256s: tuple[str, ...]


class FetchReply(_Message, frozen=True, kw_only=True):
    """`missing`: what the source did not have (or the reason why it could not be reached)."""

    missing: tuple[str, ...] = ()
    problem: str = ""


class ProbePeer(_Message, frozen=True, kw_only=True):
    """Measure the way to another node's agent: round trips of small messages, then `size_bytes` one way."""

    peer: PeerAddress
    round_trips: int = 20
    size_bytes: int = 8_000_000


class ProbeReply(_Message, frozen=True, kw_only=True):
    """`latency_s`: median round trip. `problem`: why it could not be reached."""

    latency_s: float = 0.0
    bandwidth_bytes_per_s: float = 0.0
    problem: str = ""


class FindModules(_Message, frozen=True, kw_only=True):
    """Which of these top-level modules the interpreter of an environment here cannot find. Imports nothing."""

    modules: tuple[str, ...]
    requirements: str = ""


class ModulesReply(_Message, frozen=True, kw_only=True):
    missing: tuple[str, ...] = ()


class ListOutputs(_Message, frozen=True, kw_only=True):
    run: str


class OutputFile(msgspec.Struct, frozen=True, kw_only=True):
    path: str
    size_bytes: int
    modified_wall_s: float


class OutputList(_Message, frozen=True, kw_only=True):
    """`beside`: files that workers made or changed in their working folder, where they are no outputs."""

    files: tuple[OutputFile, ...] = ()
    beside: tuple[str, ...] = ()


class ReadOutput(_Message, frozen=True, kw_only=True):
    run: str
    path: str
    offset: int = 0
    limit: int = 2**20


class OutputChunk(_Message, frozen=True, kw_only=True):
    content: bytes
    size_bytes: int
    """Of the whole file."""


class PullLogs(_Message, frozen=True, kw_only=True):
    """What workers wrote since the cursor `after`, for the control process's own copy; waits up to `wait_s`.

    At most the last MB of each log comes; what was skipped shows in the offsets."""

    after: int
    wait_s: float = 0.0
    limit_bytes: int = 4 * 2**20


class LogPiece(msgspec.Struct, frozen=True, kw_only=True):
    worker: str
    stream: Literal["out", "err"]
    offset: int
    content: bytes


class LogBatch(_Message, frozen=True, kw_only=True):
    """`reported`: runs whose workers have reported something since the batch before (told every few seconds)."""

    next: int
    pieces: tuple[LogPiece, ...] = ()
    reported: tuple[str, ...] = ()


class StopWorker(_Message, frozen=True, kw_only=True):
    """stop: SIGTERM to the worker's process group, SIGKILL after `grace_s`. abort: SIGKILL at once. pause: an elastic
    worker commits, saves and leaves; any other is frozen (SIGSTOP) and keeps its devices. thaw: SIGCONT.
    release: leave when the next generation comes without it; SIGTERM after `grace_s`."""

    worker: str
    how: Literal["stop", "abort", "pause", "thaw", "release"]
    grace_s: float = 10.0


class Member(msgspec.Struct, frozen=True):
    """One worker of a generation; its rank is its position."""

    worker: str
    address: str


class Announce(_Message, frozen=True, kw_only=True):
    """The newest generation of a run, for the agent to keep and tell its workers, now and when they connect."""

    run: str
    attempt: int
    number: int
    members: tuple[Member, ...]
    reason: str


class StateAt(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where the saved state of a trial may lie; `peer`: how that node's agent is reached from others, if it is."""

    trial: int
    node: str
    peer: PeerAddress | None = None


class SliceOrder(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A slice of a trial as its worker gets it: `values` is the function's `config` (over the run's own). `rounds` are
    those that it has had, `step` its newest report's, `saved` the rounds that a state of it holds, which lies at one of
    `states` (the likeliest first). `objectives`: the metrics that count, of which a value that is not finite ends the
    trial."""

    grant: Grant
    values: Values
    rounds: int = 0
    step: int = 0
    saved: int = 0
    states: tuple[StateAt, ...] = ()
    objectives: tuple[str, ...] = ()
    metric_within_s: float = 0.0
    leave_within_s: float = 10.0
    """How long its function may take to come to its end once it was left."""


class RunSlice(_Message, frozen=True, kw_only=True):
    """Give `worker` this slice, now or once it has connected; also what the worker is sent. The same one may come
    twice, and is run once."""

    worker: str
    order: SliceOrder


class PullEvents(_Message, frozen=True, kw_only=True):
    """Events after the cursor `after`, which acknowledges all up to it; waits up to `wait_s` for the first."""

    after: int
    wait_s: float = 0.0
    limit: int = 500


AgentEvent = WorkerStarted | WorkerReady | WorkerExited | WorkerHung | SliceEnded


class NumberedEvent(msgspec.Struct, frozen=True):
    number: int
    event: AgentEvent


class EventBatch(_Message, frozen=True, kw_only=True):
    events: tuple[NumberedEvent, ...]


class ReadLog(_Message, frozen=True, kw_only=True):
    """Bytes of a worker's log from `offset` (negative: that many from the end); waits up to `wait_s` for some. `steps`
    are its commits (`steps.jsonl`)."""

    worker: str
    stream: Literal["out", "err", "steps"] = "out"
    offset: int = 0
    limit: int = 256 * 1024
    wait_s: float = 0.0


class LogChunk(_Message, frozen=True, kw_only=True):
    """`offset` is where `content` begins (later than asked where old parts were dropped).

    `ended`: no more will come."""

    offset: int
    content: bytes
    ended: bool


class PullProgress(_Message, frozen=True, kw_only=True):
    """The newest `Progress` of every live worker, once any is newer than `after`; waits up to `wait_s`."""

    after: int = 0
    wait_s: float = 0.0


class ProgressBatch(_Message, frozen=True, kw_only=True):
    number: int
    progress: tuple["Progress", ...]


class ReadReports(_Message, frozen=True, kw_only=True):
    """What workers of a run reported, from line `after` on; first wins per (step, name)."""

    run: str
    after: int = 0
    limit: int = 1_000


class ReportBatch(_Message, frozen=True, kw_only=True):
    next: int
    reports: tuple["Report", ...]


class Usage(_Message, frozen=True, kw_only=True):
    """Asks for the processes of this node. `ports`: and for what listens there, which takes some milliseconds more."""

    ports: bool = False


class ProcessUsage(msgspec.Struct, frozen=True, kw_only=True):
    role: str
    pid: int
    resident_bytes: int
    private_bytes: int
    cpu_s: float


class ListeningPort(msgspec.Struct, frozen=True):
    """A TCP port that others can reach. `owner`: a role of ours, `ray` and its program, "" for anybody else."""

    address: str
    port: int
    owner: str = ""


class UsageReply(_Message, frozen=True, kw_only=True):
    processes: tuple[ProcessUsage, ...]
    free_memory_bytes: int
    free_disk_bytes: int
    warnings: tuple[str, ...] = ()
    """As in `ControlWelcome`."""
    wall_s: float = 0.0
    """The node's clock, to be compared."""
    agent_age_s: float = 0.0
    total_memory_bytes: int = 0
    total_disk_bytes: int = 0
    ports: tuple[ListeningPort, ...] = ()
    """If they were asked for."""


class ForgetRun(_Message, frozen=True, kw_only=True):
    """Deletes what the node keeps of an ended run: files, logs and worker records (not its outputs)."""

    run: str


class Shutdown(_Message, frozen=True, kw_only=True):
    """Ends every worker and zygote of this agent, then the agent."""

    grace_s: float = 5.0


class Ok(_Message, frozen=True, kw_only=True):
    pass


class Refused(_Message, frozen=True, kw_only=True):
    code: str
    message: str
    hint: str = ""


RequestBody = (
    ControlHello | StartWorker | PutBlob | PutBlobPart | FetchBlobs | ProbePeer | FindModules | ListOutputs
    | ReadOutput | PullLogs | StopWorker | Announce | RunSlice | AskProposer | PullEvents | ReadLog | PullProgress
    | ReadReports | Usage | ForgetRun | Shutdown
)  # fmt: skip
ReplyBody = (
    ControlWelcome | FetchReply | ProbeReply | ModulesReply | OutputList | OutputChunk | LogBatch | StartReply
    | Proposed | EventBatch | LogChunk | ProgressBatch | ReportBatch | UsageReply | Ok | Refused
)  # fmt: skip


class Request(msgspec.Struct, frozen=True):
    id: int
    body: RequestBody


class Reply(msgspec.Struct, frozen=True):
    id: int
    body: ReplyBody | Beat
    """A `Beat` answers nothing: its id is 0."""


# Worker to agent


class WorkerHello(_Message, frozen=True, kw_only=True):
    worker: str
    pid: int


class Ready(_Message, frozen=True, kw_only=True):
    """Entered `run.steps`; sent again after each reconnection. `holds`: it has committed a step as one of those that
    compute, so it holds the run's newest state for as long as it lives."""

    address: str
    micro_shards: int
    numerics: str
    holds: bool = False


class Progress(_Message, frozen=True, kw_only=True):
    """Where a worker is. `phase_number` grows with each change of phase; a hang is one that does not.

    `phase`: `starting`, `compute`, `exchange`, `wait`, `apply`, `checkpoint`, `done`. `waits_for`: worker indices."""

    worker: str
    generation: int = 0
    step: int = 0
    """Steps committed so far."""
    until: int = 0
    phase: str = "starting"
    phase_number: int = 0
    waits_for: tuple[int, ...] = ()
    unreachable: tuple[int, ...] = ()
    """Those among `waits_for` to whom no connection can be made."""
    loss: float | None = None
    step_s: float | None = None
    """Median of the last steps, seconds."""
    samples_per_s: float | None = None
    tokens_per_s: float | None = None


class Report(_Message, frozen=True, kw_only=True, omit_defaults=True):
    """`trial`: of a tune run."""

    step: int
    values: dict[str, float]
    trial: int | None = None


class SliceDone(_Message, frozen=True, kw_only=True):
    """The slice of that number is over. Sent again after each reconnection until there is another slice."""

    number: int
    result: Result


class CheckpointSaved(_Message, frozen=True, kw_only=True):
    step: int
    path: str
    size_bytes: int


# Agent to worker


class NewGeneration(_Message, frozen=True, kw_only=True):
    attempt: int
    number: int
    members: tuple[Member, ...]
    reason: str


class PleasePause(_Message, frozen=True, kw_only=True):
    pass


class PleaseLeave(_Message, frozen=True, kw_only=True):
    """The worker will not be a member of the next generation."""


WorkerMessage = WorkerHello | Ready | Progress | Report | CheckpointSaved | SliceDone | Proposed


class Reachable(_Message, frozen=True, kw_only=True):
    """The node's address on the network between nodes, as soon as it has one: the worker listens there for peers on
    other hosts, on a free port of `ports` (first, last), and says `Ready` (again). `key` authenticates the peers of its
    attempt to each other. An address of "": this worker cannot be reached from other hosts."""

    node: str
    address: str
    ports: tuple[int, int]
    key: bytes


MessageToWorker = NewGeneration | PleasePause | PleaseLeave | Reachable | RunSlice | ProposerAsk

Opening = ControlHello | WorkerHello
