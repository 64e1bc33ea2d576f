"""An agent and a control process as small as can be, to run real training workers under: everything happens in `pump`.

Workers are forked from the test process. Generations are announced as the real control process does: the first once
all are ready, another whenever the set of ready, live, not released workers changes. A fault ends a worker by SIGKILL
at a named point of the protocol (`racimo.worker.train.faults`).
"""

import faulthandler
import json
import os
import selectors
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch

from racimo.agent.frames import FrameBuffer, encode_frame
from racimo.agent.protocol import (
    CheckpointSaved,
    Member,
    NewGeneration,
    PleaseLeave,
    PleasePause,
    Progress,
    Reachable,
    Ready,
    Report,
    WorkerContext,
    WorkerHello,
    WorkerMessage,
)
from racimo.spec.run import CheckpointSpec
from racimo.worker.context import CONTEXT_VARIABLE, WorkerLeaving
from racimo.worker.train import faults
from racimo.worker.train.batches import Batches

Fault = tuple[int, str, int]
"""Worker index, point, committed steps from which on it strikes."""
_decode = msgspec.msgpack.Decoder(WorkerMessage).decode


class Child:
    def __init__(self, index: int, pid: int, folder: Path) -> None:
        self.index = index
        self.pid = pid
        self.pidfd = os.pidfd_open(pid)
        self.folder = folder
        self.connection: socket.socket | None = None
        self.ready: Ready | None = None
        self.progress: Progress | None = None
        self.released = False
        self.status: int | None = None

    @property
    def outcome(self) -> str:
        """`finished`, `paused`, `released`, a signal's name, or the error's code."""
        assert self.status is not None
        if os.WIFSIGNALED(self.status):
            return signal.Signals(os.WTERMSIG(self.status)).name
        return (self.folder / "outcome").read_text()

    @property
    def error(self) -> str:
        return (self.folder / "err.log").read_text()


class TinyCluster:
    """One attempt of one run. `program(run_config)` is the user's training function.

    `nodes`: a letter for each worker, in turn, says on which node it believes to be; between nodes they speak TCP.
    """

    def __init__(
        self,
        home: Path,
        program: Callable[[dict[str, Any]], None],
        config: dict[str, Any] | None = None,
        *,
        most: int = 8,
        checkpoint: CheckpointSpec | None = None,
        attempt: int = 1,
        faults: tuple[Fault, ...] = (),
        replace: bool = False,
        first_generation: int = 1,
        nodes: str = "",
    ) -> None:
        self.home = home
        self.output_dir = home / "outputs"
        self.output_dir.mkdir(parents=True, exist_ok=True)
        self.children: dict[int, Child] = {}
        self.reports: list[Report] = []
        self.saved: list[CheckpointSaved] = []
        self.generations: list[NewGeneration] = []
        self.on_generation: Callable[[NewGeneration], None] = lambda _: None
        self._program = program
        self._config = config or {}
        self._most = most
        self._checkpoint = checkpoint or CheckpointSpec()
        self._attempt = attempt
        self._faults = faults
        self._replace = replace
        self._nodes = nodes
        self._number = first_generation
        self._next_index = 0
        self._announcing = True
        self._selector = selectors.DefaultSelector()
        self._open()

    # The agent's socket

    def _open(self) -> None:
        path = self.home / "agent.sock"
        path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(64)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def agent_dies(self) -> None:
        self._selector.unregister(self._listener)
        self._listener.close()
        (self.home / "agent.sock").unlink()
        for child in self.children.values():
            if child.connection is not None:
                self._hang_up(child.connection)

    def agent_returns(self) -> None:
        self._open()

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        frames = FrameBuffer()
        owner: list[Child] = []

        def read() -> None:
            try:
                content = connection.recv(65536)
            except ConnectionResetError:
                content = b""
            if not content:
                self._hang_up(connection)
                return
            for frame in frames.feed(content):
                self._take(_decode(frame), connection, owner)

        self._selector.register(connection, selectors.EVENT_READ, read)

    def _hang_up(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        connection.close()
        for child in self.children.values():
            if child.connection is connection:
                child.connection = None

    def _take(self, message: Any, connection: socket.socket, owner: list[Child]) -> None:
        if isinstance(message, WorkerHello):
            child = self.children[int(message.worker.rsplit("/", 1)[1])]
            child.connection = connection
            owner.append(child)
            if self._nodes:
                self._send(child, self._reachable(child.index))
            if self.generations:
                self._send(child, self.generations[-1])
        elif isinstance(message, Ready):
            if self._nodes and "tcp:" not in message.address:
                return  # it does not yet listen to others
            owner[0].ready = message
            self._announce()
        elif isinstance(message, Progress):
            owner[0].progress = message
        elif isinstance(message, Report):
            self.reports.append(message)
        elif isinstance(message, CheckpointSaved):
            self.saved.append(message)

    def _send(self, child: Child, message: Any) -> None:
        if child.connection is not None:
            try:
                child.connection.sendall(encode_frame(message))
            except OSError:
                pass  # it is ending; its pidfd will say so

    # Control

    def hold_announcements(self, hold: bool) -> None:
        """As if the control process were down (True) and back (False)."""
        self._announcing = not hold
        if not hold:
            self._announce()

    def _announce(self) -> None:
        live = [child for child in self.children.values() if child.status is None and not child.released]
        if not self._announcing or not live:
            return
        if not self.generations and any(child.ready is None for child in live):
            return
        ready = [child for child in live if child.ready is not None]
        if "finished" in self.outcomes:
            ready = [child for child in ready if child.index in self._member_indices]
        members = tuple(Member(self._name(child.index), child.ready.address) for child in ready if child.ready)
        if not members or (self.generations and self.generations[-1].members == members):
            return
        generation = NewGeneration(attempt=self._attempt, number=self._number, members=members, reason="test")
        self._number += 1
        self.generations.append(generation)
        for child in self.children.values():
            if child.status is None:
                self._send(child, generation)
        self.on_generation(generation)

    def release(self, index: int) -> None:
        self.children[index].released = True
        self._send(self.children[index], PleaseLeave())
        self._announce()

    def pause(self) -> None:
        for child in self.live:
            self._send(child, PleasePause())

    @property
    def _member_indices(self) -> set[int]:
        return {int(m.worker.rsplit("/", 1)[1]) for m in self.generations[-1].members} if self.generations else set()

    @property
    def next_generation(self) -> int:
        return self._number

    @property
    def live(self) -> list[Child]:
        return [child for child in self.children.values() if child.status is None]

    @property
    def committed(self) -> int:
        return max((child.progress.step for child in self.children.values() if child.progress), default=0)

    def _node(self, index: int) -> str:
        return self._nodes[index % len(self._nodes)] if self._nodes else "n1"

    def _reachable(self, index: int) -> Reachable:
        node = self._node(index)
        address = f"127.0.0.{1 + ord(node) % 100}"
        return Reachable(node=node, address=address, ports=(0, 0), key=f"mesh run/{self._attempt}".encode())

    def _name(self, index: int) -> str:
        return f"run/{self._attempt}/{index}"

    # Workers

    def start(self, count: int = 1) -> list[int]:
        return [self._start_one() for _ in range(count)]

    def _start_one(self) -> int:
        index, self._next_index = self._next_index, self._next_index + 1
        folder = self.home / "workers" / str(self._attempt) / str(index)
        folder.mkdir(parents=True)
        context = WorkerContext(
            worker=self._name(index),
            run="run",
            attempt=self._attempt,
            index=index,
            rank=index,
            world_size=1,
            least=1,
            most=self._most,
            seed=0,
            threads=1,
            devices=(index,),
            directory=str(folder),
            output_dir=str(self.output_dir),
            checkpoint=self._checkpoint,
            agent_socket=str(self.home / "agent.sock"),
            node=self._node(index),
            host="here",
        )
        (folder / "worker.json").write_bytes(msgspec.json.encode(context))
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            self._be_worker(index, folder)
        child = Child(index, pid, folder)
        self.children[index] = child
        self._selector.register(child.pidfd, selectors.EVENT_READ, lambda: self._reap(child))
        return index

    def _be_worker(self, index: int, folder: Path) -> None:
        code, outcome = 1, "worker-raised"
        try:
            for name, number in (("out.log", 1), ("err.log", 2)):
                os.dup2(os.open(folder / name, os.O_CREAT | os.O_WRONLY | os.O_APPEND), number)
            sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
            self._selector.close()
            self._listener.close()
            for other in self.live:
                os.close(other.pidfd)
                if other.connection is not None:
                    other.connection.close()
            faulthandler.register(signal.SIGUSR2, all_threads=True)
            os.environ[CONTEXT_VARIABLE] = str(folder / "worker.json")
            torch.set_num_threads(1)
            faults.at = _killer([fault for fault in self._faults if fault[0] == index])
            import racimo

            run = racimo.current_run()
            self._program(dict(self._config, index=index))
            run.close()
            code, outcome = 0, "finished"
        except WorkerLeaving as leaving:
            code, outcome = 0, leaving.outcome
        except BaseException as error:  # noqa: BLE001 - the exit record of a test worker
            traceback.print_exc()
            outcome = getattr(error, "code", "worker-raised")
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            (folder / "outcome").write_text(str(outcome))
            os._exit(code)

    def kill(self, index: int) -> None:
        os.kill(self.children[index].pid, signal.SIGKILL)

    def _reap(self, child: Child) -> None:
        self._selector.unregister(child.pidfd)
        _, child.status = os.waitpid(child.pid, 0)
        os.close(child.pidfd)
        if self._replace and child.outcome == "SIGKILL" and "finished" not in self.outcomes:
            self._start_one()
        if child.outcome == "finished":  # nobody joins any more; who did not become a member is aborted
            for late in [late for late in self.live if late.index not in self._member_indices]:
                os.kill(late.pid, signal.SIGKILL)
        self._announce()

    # Time

    def pump(self, condition: Callable[[], bool], timeout_s: float = 60.0, wake_s: float = 60.0) -> None:
        """Takes part in the cluster's life until the condition holds; looks at it after every event and `wake_s`."""
        deadline_s = time.monotonic() + timeout_s
        while not condition():
            left_s = deadline_s - time.monotonic()
            assert left_s > 0, f"timed out\n{self._story_with_stacks()}"
            for key, _ in self._selector.select(min(left_s, wake_s)):
                key.data()

    def _story_with_stacks(self) -> str:
        for child in self.live:
            os.kill(child.pid, signal.SIGUSR2)
        time.sleep(0.5)  # they write within a moment, and nobody tells when
        return self.story()

    def run(self, count: int, timeout_s: float = 60.0) -> None:
        """Starts `count` workers and waits until all have ended."""
        self.start(count)
        self.finish(timeout_s)

    def finish(self, timeout_s: float = 60.0) -> None:
        self.pump(lambda: not self.live, timeout_s)

    def close(self) -> None:
        for child in self.live:
            os.kill(child.pid, signal.SIGKILL)
        self._replace = False
        self.pump(lambda: not self.live)
        self._selector.close()
        self._listener.close()

    # What came out

    @property
    def outcomes(self) -> list[str]:
        return [child.outcome for child in self.children.values() if child.status is not None]

    def hashes(self) -> set[str]:
        """The state hashes that finished workers wrote."""
        return {path.read_text() for path in self.output_dir.glob("hash-*.txt")}

    def story(self) -> str:
        lines = [f"generation {g.number}: {[m.worker for m in g.members]}" for g in self.generations]
        for child in self.children.values():
            state = child.outcome if child.status is not None else f"live, {child.progress}"
            lines.append(f"worker {child.index}: {state}\n{child.error[-3000:]}")
        return "\n".join(lines)


def committed_lines(home: Path) -> list[dict[str, Any]]:
    """All lines of all `steps.jsonl`, whatever the attempt."""
    files = sorted((home / "workers").rglob("steps.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines() if line.endswith("}")]


def every_micro_shard_counted_once(home: Path, until: int, num_samples: int = 100) -> None:
    """Asserts it from the workers' own lines: steps 1..until without a gap, each shard of each in one contribution.

    A step has lines of two generations only if whoever committed it in the older one died alone; the newer counts."""
    lines = committed_lines(home)
    batches = Batches(range(num_samples), global_batch_size=32)
    assert {line["step"] for line in lines} == set(range(1, until + 1))
    for step in range(1, until + 1):
        of_step = [line for line in lines if line["step"] == step]
        newest = max(line["generation"] for line in of_step)
        for line in of_step:
            if line["generation"] == newest:
                counted = sorted(shard for shards in line["contributions"].values() for shard in shards)
                assert counted == batches.present(step - 1, 8), line
    assert len({(line["step"], line["loss"]) for line in lines}) == until, "a step with two losses"


def _killer(mine: list[Fault]) -> Callable[[str, int], None]:
    def strike(point: str, step: int) -> None:
        if any(point == name and step >= first for _, name, first in mine):
            os.kill(os.getpid(), signal.SIGKILL)

    return strike
