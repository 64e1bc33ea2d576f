"""One simulated worker: what its process does, and what its node's disk remembers of it."""

from racimo.agent.protocol import WorkerOrder
from racimo.sim.timeline import Timer
from racimo.state.nouns import Exit, parse_worker_id


class SimWorker:
    """`alive` is the truth about the process; `ending` what is written on disk; `spooled` what its agent has said."""

    def __init__(self, order: WorkerOrder, node: str) -> None:
        self.order = order
        self.node = node
        self.run, self.attempt, self.index = parse_worker_id(order.worker)
        self.pid: int | None = None
        self.alive = False
        self.frozen = False
        self.ending: Exit | None = None
        self.ready = False
        self.asked: str = ""
        self.spooled: set[str] = set()
        self.acknowledged = False
        # A command's time that is left, and the timer that runs it down.
        self.remaining_s = 0.0
        self.running_since_s = 0.0
        self.timer: Timer | None = None
        # Training
        self.step: int | None = None
        self.holds = False
        self.generation = 0
        self.members: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.order.worker

    @property
    def tuning(self) -> bool:
        return self.order.kind == "tune"

    @property
    def training(self) -> bool:
        return self.order.kind == "train" and bool(self.order.train_function)
