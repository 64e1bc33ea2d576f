"""A small stage for decision tests: a core on a memory journal, a hand-moved clock, facts in, intents out."""

from collections import Counter
from typing import Any

from racimo.act.journal import MemoryDisk, MemoryJournal
from racimo.control.core import Core
from racimo.control.effects import Effect
from racimo.decide import decide
from racimo.spec.run import RunSpec
from racimo.state import events as ev
from racimo.state.fold import State, fold
from racimo.state.nouns import Device, Exit, Failure, Node, Outcome, Run


class HandClock:
    def __init__(self, at_s: float = 100.0) -> None:
        self.at_s = at_s

    def now_s(self) -> float:
        return self.at_s

    def wall_s(self) -> float:
        return 1_700_000_000.0 + self.at_s


def node(num_devices: int = 4, node_id: str = "n1", kind: str = "cpu", **more: Any) -> Node:
    return Node(id=node_id, host=node_id, devices=tuple(Device(i, kind) for i in range(num_devices)), **more)


class Stage:
    """`run` is the id of the newest run; every helper ticks and commits, as the real loop does after each fact."""

    def __init__(self, *nodes: Node) -> None:
        self.disk = MemoryDisk()
        self.clock = HandClock()
        self.core = Core(MemoryJournal(self.disk), self.clock)
        self.effects: list[Effect] = []
        self.intents: list[ev.Intent] = []
        for one in nodes or (node(),):
            self.core.node_joined(one)
        self.turn()

    @property
    def state(self) -> State:
        return self.core.state

    def restart(self) -> None:
        """Another control process on the same journal; no node has answered it yet."""
        self.core = Core(MemoryJournal(self.disk), self.clock)

    def turn(self, after_s: float = 0.0) -> None:
        self.clock.at_s += after_s
        self.core.tick()
        assert not decide(self.state, self.core._now_s(), self.core.absent).intents, "deciding twice adds something"
        assert self.core.next_due_s is None or self.core.next_due_s > self.core._now_s(), "a clock that spins"
        self.core.commit()
        self.effects = self.core.take_effects()
        self.intents = [r.event for r in self.core.take_records() if isinstance(r.event, ev.Intent)]
        assert fold(MemoryJournal(self.disk).records()) == self.state
        assert State.from_bytes(self.state.to_bytes()) == self.state
        held = Counter((w.node, d, r.id) for r in self.state.runs.values() for w in r.live_workers for d in w.devices)
        assert len(held) == len({place[:2] for place in held}), "a device is leased twice"
        assert all(count <= self.state.runs[run].spec.shares for (_, _, run), count in held.items()), (
            "shared by too many"
        )

    def command(self, workers: int = 1, **spec: Any) -> str:
        return self._submit(RunSpec(command=("work",), workers=workers, **spec))

    def train(self, workers: str | int = 2, **spec: Any) -> str:
        return self._submit(RunSpec(train="train.py", workers=workers, **spec))

    def _submit(self, spec: RunSpec) -> str:
        run = self.core.submit(spec, f"request-{self.state.num_submitted}")
        self.turn()
        return run.id

    def run(self, run: str) -> Run:
        return self.state.runs[run]

    def started(self, run: str, *indices: int) -> None:
        for index in indices or tuple(w.index for w in self.run(run).live_workers):
            attempt = self.run(run).attempt
            self.core.agent_event(ev.WorkerStarted(run=run, attempt=attempt, index=index, pid=1000 + index))
        self.turn()

    def ready(self, run: str, *indices: int, micro_shards: int = 8, holds: bool = False) -> None:
        for index in indices or tuple(w.index for w in self.run(run).live_workers):
            self.core.agent_event(
                ev.WorkerReady(
                    run=run, attempt=self.run(run).attempt, index=index, address=f"a:{index}",
                    micro_shards=micro_shards, numerics="n", holds=holds,
                )
            )  # fmt: skip
        self.turn()

    def elastic(self, workers: str | int = 2, **spec: Any) -> str:
        run = self.train(workers, **spec)
        self.started(run)
        self.ready(run)
        return run

    def exit(
        self,
        run: str,
        index: int,
        outcome: Outcome = "finished",
        *,
        code: str = "",
        commits: int = 0,
        turn: bool = True,
    ) -> None:
        failure = Failure(code=code, message=f"worker {index} says {code}") if code else None
        numbers = {"finished": (0, None), "failed": (1, None), "killed": (None, 9), "paused": (0, None)}
        number, signal = numbers.get(outcome, (None, None))
        ending = Exit(outcome=outcome, code=number, signal=signal, failure=failure, held_s=2.0)
        event = ev.WorkerExited(run=run, attempt=self.run(run).attempt, index=index, exit=ending, commits=commits)
        self.core.agent_event(event)
        if turn:
            self.turn()

    def only(self, kind: type) -> Any:
        """The one new intent of this kind."""
        found = [intent for intent in self.intents if isinstance(intent, kind)]
        assert len(found) == 1, self.intents
        return found[0]
