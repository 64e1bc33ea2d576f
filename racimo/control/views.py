"""What the API answers: the same structs on both ends. Light: no web framework is imported here."""

from typing import Literal

import msgspec

from racimo.agent.protocol import FileEntry, ProcessUsage, Progress, Report
from racimo.spec.run import RunSpec
from racimo.spec.space import Scalar
from racimo.spec.study import StudySpec
from racimo.state.nouns import Exit, Failure, Node, Reason


class _View(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    pass


class ErrorView(_View, frozen=True, kw_only=True):
    code: str
    message: str
    hint: str = ""


class WorkerView(_View, frozen=True, kw_only=True):
    id: str
    index: int
    rank: int | None = None
    """Rank in the present (or last) generation; before there is one, as first planned. None for who died or left."""
    node: str
    devices: tuple[int, ...]
    status: str
    pid: int | None = None
    exit: Exit | None = None


class RunProgress(_View, frozen=True, kw_only=True):
    """The run as a whole, made from its workers' newest `Progress`."""

    run: str
    status: str
    num_workers: int
    step: int = 0
    until: int = 0
    loss: float | None = None
    step_s: float | None = None
    samples_per_s: float | None = None
    tokens_per_s: float | None = None
    remaining_s: float | None = None
    cost: float = 0.0
    generation: int = 0
    workers: tuple[Progress, ...] = ()


class StudyProgress(_View, frozen=True, kw_only=True):
    """Of a tune run: how many of at most `most` trials have begun, and the best value of the first metric."""

    num_begun: int
    most: int
    metric: str
    best: float | None = None


class RunView(_View, frozen=True, kw_only=True):
    id: str
    kind: str
    status: str
    spec: RunSpec
    reason: Reason | None = None
    failure: Failure | None = None
    submitted_wall_s: float
    queued_s: float = 0.0
    """Seconds spent waiting for devices so far."""
    running_s: float = 0.0
    attempt: int = 0
    retries_used: int = 0
    elastic: bool = False
    least: int = 1
    most: int = 1
    num_live_workers: int = 0
    generation: int = 0
    device_s: float = 0.0
    cost: float = 0.0
    price_known: bool = False
    """False where the price per device-hour is zero: a cost of zero then says nothing."""
    workers: tuple[WorkerView, ...] = ()
    progress: RunProgress | None = None
    study: StudyProgress | None = None
    output_dir: str = ""


class TrialView(_View, frozen=True, kw_only=True):
    """One trial. `device_s` and `cost` are of slices that have ended."""

    number: int
    status: str
    values: dict[str, Scalar]
    by: str = ""
    rounds: int = 0
    step: int = 0
    metrics: dict[str, float] = {}
    curve: tuple[tuple[int, float], ...] = ()
    worker: str = ""
    device_s: float = 0.0
    cost: float = 0.0
    retries: int = 0
    reason: Reason | None = None
    failure: Failure | None = None


class StudyView(_View, frozen=True, kw_only=True):
    """A tune run's trials, those that changed since the answer before: ask again with `seq`."""

    seq: int
    counts: dict[str, int] = {}
    best: int | None = None
    num_trials: int = 0
    device_s: float = 0.0
    cost: float = 0.0
    trials: tuple[TrialView, ...] = ()


class DownView(_View, frozen=True, kw_only=True):
    """`racimo down`: runs that go on at the next `up`, and runs that end now."""

    kept: tuple[str, ...] = ()
    stopped: tuple[str, ...] = ()


class NodeView(_View, frozen=True, kw_only=True):
    node: Node
    num_free: int
    leases: dict[int, str] = {}
    """Device index to worker id."""
    free_memory_bytes: int = 0
    free_disk_bytes: int = 0
    processes: tuple[ProcessUsage, ...] = ()
    """Ours and the workers, as the node's agent sees them."""
    warnings: tuple[str, ...] = ()
    """Such as a zygote that is still importing torch, or that its agent does not answer."""
    silent_s: float = 0.0
    """For how long it has not answered; 0 while it does."""
    drain_left_s: float | None = None
    """Until what still runs there is stopped, where it is being drained by a deadline."""


class ClusterView(_View, frozen=True, kw_only=True):
    id: str
    version: str
    protocol: int
    home: str
    address: str
    started_wall_s: float
    num_devices: int
    """Of all nodes that are up."""
    num_free: int
    num_nodes: int = 1
    num_nodes_up: int = 1
    price_per_device_hour: float
    """Of this machine's devices; other nodes may have their own."""
    num_queued: int
    num_running: int
    num_ended: int
    processes: tuple[ProcessUsage, ...] = ()
    carrier: Literal["", "link", "ray"] = ""
    """What brings other machines; "" in a cluster that none can join."""
    wall_s: float = 0.0
    """The head's clock, to be compared."""
    versions: dict[str, str] = {}
    """Of the head: `python` and `torch`, whose minor versions a node must share."""
    warnings: tuple[str, ...] = ()
    """Such as a journal whose torn tail was cut off, or a zygote that is still importing torch."""


class LogLine(_View, frozen=True, kw_only=True):
    """One whole line (or the unfinished last one) of a worker's output."""

    worker: str
    stream: str
    text: str
    offset: int = 0
    """Up to where in that stream this line goes, in bytes: from there a reader goes on. 0: a word of ours."""


class OutputView(_View, frozen=True, kw_only=True):
    path: str
    size_bytes: int
    modified_wall_s: float
    node: str = ""
    """Where it lies; of several the one of the newest attempt's lowest rank."""
    others: tuple[str, ...] = ()
    """Nodes that have a file of this path too."""


class OutputsView(_View, frozen=True, kw_only=True, omit_defaults=False):
    """`away`: nodes of the run that do not answer; what lies only there is not among `files`. `beside`: files that its
    workers made or changed in their working folder, where they are no outputs."""

    files: tuple[OutputView, ...]
    away: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()


class SnapshotRequest(_View, frozen=True, kw_only=True):
    files: tuple[FileEntry, ...]


class SnapshotView(_View, frozen=True, kw_only=True):
    id: str
    missing: tuple[str, ...] = ()


class SubmitRequest(_View, frozen=True, kw_only=True):
    spec: RunSpec
    request: str


class StudyRequest(_View, frozen=True, kw_only=True):
    """New terms for a tune run. `other_space`: also if its space is another than before."""

    study: StudySpec
    other_space: bool = False


class FitRequest(_View, frozen=True, kw_only=True):
    """Whether a run could ever start, asked before its files are sent."""

    spec: RunSpec


class ReportsView(_View, frozen=True, kw_only=True):
    """`away`: nodes of the run that do not answer; what was reported only there may be missing."""

    next: int
    reports: tuple[Report, ...]
    away: tuple[str, ...] = ()


class OkView(_View, kw_only=True, frozen=True, omit_defaults=False):
    ok: bool = True


class ScaleRequest(_View, kw_only=True, frozen=True):
    workers: str | int
    """A count or a range such as `2..4`."""


class SecretRequest(_View, kw_only=True, frozen=True):
    value: str


class DrainRequest(_View, kw_only=True, frozen=True):
    """`deadline_s`: when what still runs there is stopped, in seconds from now; None: it may take its time."""

    deadline_s: float | None = None
    undo: bool = False


class ForgetRequest(_View, kw_only=True, frozen=True):
    """`confirm_dead`: a person vouches that nothing runs on that node any more."""

    confirm_dead: bool = False


class ExecRequest(_View, kw_only=True, frozen=True):
    command: tuple[str, ...]
    worker: str = ""
    """Beside which worker: its index, or its id; any live one if empty."""


class ExecExitView(_View, kw_only=True, frozen=True):
    """The last line of an `exec`."""

    exit: Exit


class EndedView(_View, kw_only=True, frozen=True):
    """The last line of `events` of an ended run: its status."""

    ended: str


class Finding(_View, kw_only=True, frozen=True):
    """What a look at the cluster found. `verdict`: ok, note (to be known) or wrong (to be cured). `node`: the one it is
    about; `peer`: the other end of a way between two. `cure` works when pasted where it is a command."""

    about: str
    node: str = ""
    peer: str = ""
    verdict: Literal["ok", "note", "wrong"]
    found: str
    cure: str = ""


class CheckView(_View, kw_only=True, frozen=True):
    """`GET /v1/check`. `took_s`: how long all of it took."""

    findings: tuple[Finding, ...]
    took_s: float
