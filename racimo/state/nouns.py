"""The nouns of a cluster as frozen values: nodes, devices, runs, attempts, workers, generations, and why.

Times named `_at_s` are on the cluster's own clock (seconds, never going back; see `racimo.control.clock`). Wall-clock
time is only in `submitted_wall_s` and the like, and only for people.
"""

from typing import Any, Literal

import msgspec

from racimo.spec.run import RunSpec

RunStatus = Literal["queued", "running", "pausing", "paused", "stopping", "succeeded", "failed", "stopped", "lost"]
ENDED: frozenset[str] = frozenset({"succeeded", "failed", "stopped", "lost"})

WorkerStatus = Literal["starting", "running", "ready", "exited"]
"""starting: planned, maybe not yet a process. running: has a process. ready: entered `run.steps`. exited: over."""

Outcome = Literal["finished", "failed", "killed", "paused", "released", "unknown"]
"""finished: exit 0. failed: another exit code or an error of its own. killed: a signal. paused and released: left at
our request. unknown: nobody saw how it ended."""


class Reason(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Why a decision fell so: a stable code, one sentence, and the numbers in it. Every surface prints this one."""

    code: str
    text: str
    counts: dict[str, int | float] = {}


class Failure(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What went wrong: `code` from `spec.errors`, one sentence, a hint, and the user's traceback if there is one."""

    code: str
    message: str
    hint: str = ""
    traceback: str = ""
    rank: int | None = None
    worker: str = ""
    others: int = 0
    """How many more workers failed after the first."""


class Device(msgspec.Struct, frozen=True):
    """One accelerator or, on a node without any, one CPU slot. `kind` is `cpu` or the accelerator's (`cuda`)."""

    index: int
    kind: str = "cpu"
    name: str = ""


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """A machine. `status`: up; silent, it does not answer and what it runs keeps its lease; lost, it was given up: what
    exact runs had there goes on elsewhere."""

    id: str
    host: str
    devices: tuple[Device, ...]
    status: Literal["up", "silent", "lost"] = "up"
    reason: Reason | None = None
    """Why it is not up, or is being drained."""
    silent_at_s: float = 0.0
    """Since when it does not answer; 0 while it does."""
    draining: bool = False
    """Gets no new work. Survives its coming back."""
    drain_deadline_s: float | None = None
    """When what still runs there is stopped, on the cluster's clock; None: it may take its time."""
    drain_at_s: float = 0.0
    """Since when it is being drained: workers of later times are replacements for those that are to leave it."""
    address: str = ""
    """The IP address at which other nodes reach its agent and its workers; "" in a cluster of one machine."""
    peer_port: int = 0
    """TCP port of its agent for other agents (contents, probes)."""
    peer_pin: str = ""
    """SHA-256 (hex) of the DER certificate that the agent shows there."""
    price_per_device_hour: float = 0.0
    memory_bytes: int = 0
    versions: dict[str, str] = {}


class Exit(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a worker ended. `held_s`: seconds of monotonic time for which it held its devices."""

    outcome: Outcome
    code: int | None = None
    signal: int | None = None
    failure: Failure | None = None
    held_s: float = 0.0


class Placement(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where one worker goes: its index within the attempt (never used twice), its node and the devices it leases."""

    index: int
    node: str
    devices: tuple[int, ...]
    paid_s: float = 0.0
    """For how many seconds it may have them until more is paid; 0: no limit."""


class Worker(msgspec.Struct, frozen=True, kw_only=True):
    """One process of an attempt, with the lease on its devices: they are its own until `exit` is recorded."""

    index: int
    attempt: int
    node: str
    devices: tuple[int, ...]
    rank: int
    """Position in the attempt as first planned (torchrun's RANK); within a generation the order of `members` rules."""
    status: WorkerStatus = "starting"
    pid: int | None = None
    address: str = ""
    numerics: str = ""
    started_at_s: float = 0.0
    paid_s: float = 0.0
    """Seconds of its life that are paid for: at their end its agent ends it. 0: no limit."""
    ready_at_s: float = 0.0
    holds: bool = False
    """It said that it holds the run's newest state."""
    leaving: Literal["", "stop", "pause", "release", "abort"] = ""
    exit: Exit | None = None
    exited_at_s: float = 0.0

    @property
    def live(self) -> bool:
        return self.exit is None


class Generation(msgspec.Struct, frozen=True, kw_only=True):
    """A period in which a training run's set of workers does not change; `members` are worker indices in rank order."""

    number: int
    members: tuple[int, ...]
    reason: Reason


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """Anything a user submitted. `workers` holds the present attempt's (ended ones included), keyed by index."""

    id: str
    spec: RunSpec
    order: int
    """Position in the order of submission."""
    status: RunStatus = "queued"
    submitted_at_s: float = 0.0
    submitted_wall_s: float = 0.0
    queued_at_s: float = 0.0
    started_at_s: float | None = None
    ended_at_s: float | None = None
    attempt: int = 0
    retries_used: int = 0
    next_index: int = 0
    workers: dict[int, Worker] = {}
    nodes: tuple[str, ...] = ()
    """Every node that a worker of any attempt was placed on, in order: there its logs and outputs are."""
    unreachable: tuple[tuple[int, int], ...] = ()
    """Pairs of this attempt's workers, on nodes that answer, of which the first could not reach the second."""
    least: int = 1
    most: int = 1
    """The range of workers in force: the spec's, or what `scale` made of it."""
    elastic: bool = False
    """Some worker of this attempt entered `run.steps`: deaths heal and sizes change without a restart."""
    micro_shards: int | None = None
    generation: Generation | None = None
    next_generation: int = 1
    """Generation numbers never repeat within a run, whatever the attempt."""
    commits_at_death: int = 0
    deaths_without_progress: int = 0
    hold: Literal["", "paused", "down"] = ""
    """Held back until `resume` (paused) or until the cluster is up again (down)."""
    reason: Reason | None = None
    """Why it is where it is (for queued runs the planner's newest, kept by the control process)."""
    failure: Failure | None = None
    device_s: float = 0.0
    """Device-seconds of workers that have ended, all attempts."""
    cost: float = 0.0
    """Of `priced_device_s` among them: each second at the price that its node had when the worker ended."""
    active_s: float = 0.0
    """Seconds for which it had an attempt, until the present one began."""
    active_since_s: float | None = None
    """Since when it has one."""
    priced_device_s: float = 0.0
    """What a state from before there were several nodes held is not among them."""

    @property
    def ended(self) -> bool:
        return self.status in ENDED

    def active_until(self, at_s: float) -> float:
        """Seconds for which it has had an attempt by `at_s`; waiting and pauses do not count."""
        return self.active_s + (max(0.0, at_s - self.active_since_s) if self.active_since_s is not None else 0.0)

    @property
    def live_workers(self) -> list[Worker]:
        return [worker for worker in self.workers.values() if worker.live]

    def num_devices_of(self, worker: Worker) -> float:
        """How many devices it is billed for: of one that the run's workers share, its part."""
        return len(worker.devices) / self.spec.shares


def worker_id(run: str, attempt: int, index: int) -> str:
    """The name under which everything about one worker is filed: `run/attempt/index`."""
    return f"{run}/{attempt}/{index}"


def parse_worker_id(name: str) -> tuple[str, int, int]:
    run, attempt, index = name.rsplit("/", 2)
    return run, int(attempt), int(index)


JsonDict = dict[str, Any]
