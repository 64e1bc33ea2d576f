"""A simulated node: its disk, its agent, its zygote and its workers. The agent and the zygote die and come back; the
workers live on without them, and what was written on disk stays. The machine may start anew, or be gone for good."""

import random
from collections.abc import Callable

from racimo.agent import protocol
from racimo.sim.timeline import Timeline
from racimo.sim.training import SimTraining
from racimo.sim.trials import SimTrials, Truth
from racimo.sim.worker import SimWorker
from racimo.spec.study import MAX_PARALLEL
from racimo.state import events as ev
from racimo.state.lease import LEASE_S
from racimo.state.nouns import Exit, Failure, Node
from racimo.state.trials import Result

FORK_S = 0.015
HANG_DETECTION_S = 60.0
DEVICE_RETRY_S = 0.05


TrainingOf = Callable[[SimWorker], SimTraining]


class AgentDown(Exception):
    """The agent cannot be reached, or died while it was asked."""


class SimMachine:
    """`on_start` is told of each process that starts, `on_news` that there is something to pull."""

    def __init__(
        self,
        timeline: Timeline,
        rng: random.Random,
        node: Node,
        training_of: TrainingOf,
        saved_at: Callable[[str, str, int], int | None],
        truth: Truth,
    ) -> None:
        self.timeline, self.rng, self.node = timeline, rng, node
        self.agent_up = True
        self.zygote_up = True
        self.gone = False
        """Destroyed, with all that was on its disk."""
        self.instance = 1
        self.die_in_requests = 0
        """The agent dies in the middle of this many-th request from now (0: not)."""
        self.workers: dict[str, SimWorker] = {}
        self.announced: dict[str, protocol.Announce] = {}
        self.spool: list[tuple[int, protocol.AgentEvent]] = []
        self.trials = SimTrials(timeline, rng, self._tell_result, self._leave_as_asked, saved_at, truth)
        self._results: list[ev.SliceEnded] = []
        """Written down by workers, and not yet told."""
        self._training_of = training_of
        self._silent_since_s: float | None = None
        self._number = 0
        self._pid = 100
        self.on_start: Callable[[SimWorker], None] = lambda worker: None
        self.on_news: Callable[[], None] = lambda: None
        self.on_agent_death: Callable[[], None] = lambda: None

    @property
    def alive(self) -> list[SimWorker]:
        return [worker for worker in self.workers.values() if worker.alive]

    # What the control process asks

    def welcome(self) -> tuple[Node, tuple[protocol.WorkerState, ...]]:
        self._asked()
        states = [
            protocol.WorkerState(worker=w.name, pid=w.pid, exited=w.ending is not None)
            for w in self.workers.values()
            if not w.acknowledged
        ]
        return self.node, tuple(states)

    def start(self, order: protocol.WorkerOrder) -> None:
        dies = self._asked(may_die_later=True)
        if self.rng.random() < 0.05:
            # Still in a socket's buffer; what was asked after it may well be answered before it is read.
            self.timeline.after(self.rng.uniform(0, 5), lambda: self._take_order(order))
        else:
            self._take_order(order)
        if dies:
            self.kill_agent()
            raise AgentDown

    def _take_order(self, order: protocol.WorkerOrder) -> None:
        if not self.agent_up or order.worker in self.workers:
            return
        worker = self.workers[order.worker] = SimWorker(order, self.node.id)
        if worker.training:
            self._training_of(worker).workers.append(worker)
        self.timeline.after(FORK_S, lambda: self._fork(worker))

    def stop(self, message: protocol.StopWorker) -> None:
        dies = self._asked(may_die_later=True)
        worker = self.workers.get(message.worker)
        if worker is None and message.how in ("stop", "abort", "release"):
            # An order that may still be on its way must never run: its end is on disk before it comes.
            worker = self.workers[message.worker] = SimWorker(
                protocol.WorkerOrder(worker=message.worker, kind="command"), self.node.id
            )
        if worker is not None and worker.ending is None:
            self._stop(worker, message.how, message.grace_s)
        if dies:
            self.kill_agent()
            raise AgentDown

    def announce(self, message: protocol.Announce) -> None:
        self._asked()
        newest = self.announced.get(message.run)
        if newest is None or newest.number <= message.number:
            self.announced[message.run] = message
            self._tell_generation(message)

    def run_slice(self, message: protocol.RunSlice) -> None:
        self._asked()
        worker = self.workers.get(message.worker)
        if worker is not None:
            self.trials.give(worker, message)

    def pull(self, after: int) -> list[tuple[int, protocol.AgentEvent]]:
        self._asked()
        for number, event in self.spool:
            worker = self.workers.get(f"{event.run}/{event.attempt}/{event.index}")
            if number <= after and isinstance(event, ev.WorkerExited) and worker is not None:
                worker.acknowledged = True
        self.spool = [entry for entry in self.spool if entry[0] > after]
        return self.spool[: self.rng.randint(1, 5)]

    def _asked(self, *, may_die_later: bool = False) -> bool:
        if not self.agent_up:
            raise AgentDown
        if self.die_in_requests:
            self.die_in_requests -= 1
            if not self.die_in_requests:
                if may_die_later and self.rng.random() < 0.5:
                    return True
                self.kill_agent()
                raise AgentDown
        return False

    # What happens to its processes

    def kill_agent(self) -> None:
        if self.agent_up:
            self.agent_up = False
            self.on_agent_death()

    def start_agent(self) -> None:
        """A new agent reads the disk: what happened without one is told now, what was ordered is started."""
        if self.agent_up or self.gone:
            return
        self.agent_up, self.instance = True, self.instance + 1
        self._end_what_lost_its_lease()
        for worker in self.workers.values():
            if worker.pid is None and worker.ending is None:
                self.timeline.after(FORK_S, lambda w=worker: self._fork(w))  # type: ignore[misc]
            self.tell(worker)
        for message in list(self.announced.values()):
            self._tell_generation(message)
        self._tell_results()
        self.on_news()

    def start_zygote(self) -> None:
        self.zygote_up = True
        for worker in self.workers.values():
            if worker.pid is None and worker.ending is None:
                self.timeline.after(FORK_S, lambda w=worker: self._fork(w))  # type: ignore[misc]

    def reboot(self) -> None:
        """Power off: every process ends, and nobody sees how. The disk stays."""
        self.kill_agent()
        for worker in self.alive:
            self._end(worker, Exit(outcome="unknown"))

    def destroy(self) -> None:
        """Nothing of it ever comes back."""
        self.agent_up, self.gone = False, True
        for worker in self.workers.values():
            worker.alive = False

    def set_contact(self, contact: bool) -> None:
        """Whether control and agent hear each other; without it what is not exact ends once its lease has."""
        if contact:
            self._silent_since_s = None
        elif self._silent_since_s is None:
            self._silent_since_s = self.timeline.now_s()
            self.timeline.after(LEASE_S + 0.1, self._end_what_lost_its_lease)

    def _end_what_lost_its_lease(self) -> None:
        since_s = self._silent_since_s
        if not self.agent_up or since_s is None or self.timeline.now_s() - since_s < LEASE_S:
            return
        for worker in self.alive:
            if not worker.ready:
                self._end_by(worker, 9)

    def kill_worker(self, worker: SimWorker) -> None:
        """SIGKILL from outside. The zygote is the parent of training workers: without it nobody sees how they ended."""
        seen = self.zygote_up or worker.order.kind == "command"
        self._end(worker, Exit(outcome="killed", signal=9) if seen else Exit(outcome="unknown"))

    def leave(self, worker: SimWorker, outcome: str) -> None:
        if worker.alive and not worker.frozen:
            self._end(worker, Exit(outcome=outcome, code=0))  # type: ignore[arg-type]

    # Within

    def _fork(self, worker: SimWorker) -> None:
        if worker.pid is not None or worker.ending is not None or not self.zygote_up or self.gone:
            return
        if any(set(other.order.devices) & set(worker.order.devices) for other in self.alive):
            # A stray of a lost attempt is still being ended there.
            self.timeline.after(DEVICE_RETRY_S, lambda: self._fork(worker))
            return
        self._pid += 1
        worker.pid, worker.alive = self._pid, True
        self.on_start(worker)
        self.tell(worker)
        config = worker.order.config
        if worker.training or worker.tuning:
            self.timeline.after(config["ready_s"] * self.rng.uniform(0.5, 1.5), lambda: self._ready(worker))
        else:
            words = worker.order.command or worker.order.args
            worker.remaining_s = float(words[1])
            if not worker.frozen:
                self._run_on(worker)

    def _ready(self, worker: SimWorker) -> None:
        if not worker.alive:
            return
        if worker.frozen:
            self.timeline.after(0.5, lambda: self._ready(worker))
            return
        worker.ready = True
        self.tell(worker)
        if worker.tuning and worker.asked:
            self._leave_as_asked(worker)
        if worker.training:
            self.timeline.after(0.0, self._training_of(worker).look)

    def _run_on(self, worker: SimWorker) -> None:
        worker.running_since_s = self.timeline.now_s()
        worker.timer = self.timeline.after(worker.remaining_s, lambda: self._done(worker))

    def _done(self, worker: SimWorker) -> None:
        words = worker.order.command or worker.order.args
        code = int(words[2])
        if worker.alive:
            self._end(worker, Exit(outcome="failed" if code else "finished", code=code))

    def _stop(self, worker: SimWorker, how: str, grace_s: float) -> None:
        if worker.pid is None and how in ("stop", "abort", "release"):
            self._end(worker, Exit(outcome="killed", signal=9))
        elif how == "abort":
            self.timeline.after(self.rng.uniform(0, 0.05), lambda: self._end_by(worker, 9))
        elif how == "stop":
            worker.asked = "stop"
            if not worker.frozen:
                stubborn = self.rng.random() < 0.2
                delay_s = grace_s if stubborn else self.rng.uniform(0, 0.3)
                self.timeline.after(delay_s, lambda: self._end_by(worker, 9 if stubborn else 15))
            else:
                self.timeline.after(grace_s, lambda: self._end_by(worker, 9))
        elif how == "thaw":
            if worker.frozen:
                worker.frozen = False
                if worker.asked == "stop":
                    self.timeline.after(self.rng.uniform(0, 0.3), lambda: self._end_by(worker, 15))
                elif worker.pid is not None and worker.order.kind == "command":
                    self._run_on(worker)
        elif worker.ready:
            self._ask_to_leave(worker, how)
        elif how == "release":
            worker.asked = how  # told once it has connected
        elif how == "pause" and not worker.frozen and worker.pid is not None:
            worker.frozen = True
            if worker.timer is not None:
                worker.timer.cancel()
                worker.remaining_s -= self.timeline.now_s() - worker.running_since_s

    def _ask_to_leave(self, worker: SimWorker, how: str) -> None:
        worker.asked = how
        if worker.tuning:
            self.trials.asked_to_leave(worker)
            return
        gone = bool(worker.members) and worker.name not in worker.members
        if how == "pause" and not worker.members:
            self.leave(worker, "paused")
        elif how == "release" and (gone or not worker.members):
            self.leave(worker, "released")

    def _tell_generation(self, message: protocol.Announce) -> None:
        names = tuple(member.worker for member in message.members)
        training: SimTraining | None = None
        for worker in list(self.workers.values()):
            same = worker.run == message.run and worker.attempt == message.attempt
            training = self._training_of(worker) if same and worker.training else training
            if same and worker.alive and worker.ready and message.number > worker.generation:
                if worker.name in names:
                    worker.generation, worker.members = message.number, names
                elif worker.asked == "release":
                    self.leave(worker, "released")
        if training is not None:
            training.look()

    def _end_by(self, worker: SimWorker, signal: int) -> None:
        self._end(worker, Exit(outcome="killed", signal=signal))

    def _end(self, worker: SimWorker, ending: Exit) -> None:
        if worker.ending is not None or self.gone:
            return
        worker.alive = False
        worker.ending = ending
        self.trials.ended(worker)
        self.timeline.after(self.rng.uniform(0.001, 0.02), lambda: self.tell(worker))

    def report_hang(self, run: str) -> None:
        """The agent looks at a run that made no progress."""
        hung = [worker for worker in self.alive if worker.run == run and worker.ready]
        if hung and self.agent_up:
            first = hung[0]
            failure = Failure(code="worker-hung", message=f"worker {first.index} hangs", rank=first.index)
            self._spool(ev.WorkerHung(run=run, attempt=first.attempt, index=first.index, failure=failure))

    def tell(self, worker: SimWorker) -> None:
        """Spools what is news about a worker; a dead agent says it when it is back."""
        if not self.agent_up:
            return
        run, attempt, index = worker.run, worker.attempt, worker.index
        if worker.pid is not None and "started" not in worker.spooled:
            self._spool(ev.WorkerStarted(run=run, attempt=attempt, index=index, pid=worker.pid))
            worker.spooled.add("started")
        said = "holds" if worker.holds else "ready"
        if worker.ready and said not in worker.spooled:
            numbers = {"micro_shards": int(worker.order.config.get("micro_shards", MAX_PARALLEL))}
            known = {"address": f"sim:{worker.pid}", "numerics": "sim", "holds": worker.holds}
            self._spool(ev.WorkerReady(run=run, attempt=attempt, index=index, **known, **numbers))  # type: ignore[arg-type]
            worker.spooled.add(said)
        if worker.ending is not None and "exited" not in worker.spooled:
            self._tell_results()
            commits = self._training_of(worker).step if worker.training else 0
            self._spool(ev.WorkerExited(run=run, attempt=attempt, index=index, exit=worker.ending, commits=commits))
            worker.spooled.add("exited")

    def _leave_as_asked(self, worker: SimWorker) -> None:
        self.leave(worker, "paused" if worker.asked == "pause" else "released")

    def _tell_result(self, worker: SimWorker, number: int, result: Result) -> None:
        """Written down by the worker first: an agent that is dead says it when it is back, before the worker's end."""
        run, attempt, index = worker.run, worker.attempt, worker.index
        self._results.append(ev.SliceEnded(run=run, attempt=attempt, index=index, number=number, result=result))
        self._tell_results()

    def _tell_results(self) -> None:
        while self.agent_up and self._results:
            self._spool(self._results.pop(0))

    def _spool(self, event: protocol.AgentEvent) -> None:
        # An agent that dies between writing and remembering says things twice.
        for _ in range(2 if self.rng.random() < 0.05 else 1):
            self._number += 1
            self.spool.append((self._number, event))
        self.on_news()
