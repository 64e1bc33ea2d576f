"""The wheel: facts into the core, one durable commit for all that came meanwhile, then effects, then answers.

What arrives while a commit is being written forms the next group, so a lone call waits for one commit (about 1 ms) and
a thousand at once share a few. Nothing is polled: an idle loop sleeps until a call comes or a decision is due.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from racimo.control.core import Core
from racimo.control.effects import Effect
from racimo.spec.errors import RacimoError
from racimo.state.events import Record

MAX_WAITING_CHANGES = 2_000
MAX_GROUP = 500
DISK_FULL_RETRY_S = 1.0
SHORTEST_TIMER_S = 0.005

T = TypeVar("T")
Change = Callable[[Core], Any]

log = logging.getLogger("racimo.control.loop")


class Loop:
    """The only one who calls a changing method of `core`. `carry` gets the effects that may be carried out."""

    def __init__(self, core: Core, carry: Callable[[list[Effect]], None]) -> None:
        self.core = core
        self._carry = carry
        self._waiting: deque[tuple[Change, asyncio.Future[Any]]] = deque()
        self._woken = asyncio.Event()
        self._pulses: dict[str, asyncio.Event] = {}
        self.on_wants: Callable[[], None] = lambda: None
        """Called when a tune run wants points from its proposer (`Core.wants`)."""
        self.disk_full: RacimoError | None = None
        """Set while the journal cannot be written."""
        self._store_thread = ThreadPoolExecutor(1, thread_name_prefix="journal")

    async def change(self, change: Callable[[Core], T]) -> T:
        """Applies `change` to the core; returns its value once all that it recorded is durable.

        `RacimoError`: what `change` raised, `disk-full` (then the change is either not made, or made and durable once
        there is space again), `busy` if too many wait already.
        """
        if self.disk_full is not None:
            raise self.disk_full
        if len(self._waiting) >= MAX_WAITING_CHANGES:
            raise RacimoError(
                "busy", f"{MAX_WAITING_CHANGES} requests wait for the journal already", "try again in a moment"
            )
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._waiting.append((change, answer))
        self._woken.set()
        return await answer

    def pulse(self, run: str) -> asyncio.Event:
        """Set once when anything about that run becomes durable. Take it before looking at the state."""
        found = self.core.state.runs.get(run)
        if found is not None and found.ended and run not in self._pulses:
            over = asyncio.Event()  # nothing will happen to it any more: not kept, and nobody waits
            over.set()
            return over
        return self._pulses.setdefault(run, asyncio.Event())

    async def records(self, run: str, after_seq: int = 0) -> list[Record]:
        """The durable records about one run, read from the journal."""
        return await self._in_store_thread(lambda: list(self.core.store.records(run, after_seq)))

    async def run(self) -> None:
        """For ever. An error here is a mistake of ours: the process ends and starts again from its journal."""
        self.core.tick()
        while True:
            await self._turn([])
            await self._await_news()
            group = [self._waiting.popleft() for _ in range(min(len(self._waiting), MAX_GROUP))]
            answers = [(answer, *self._apply(change)) for change, answer in group if not answer.cancelled()]
            self.core.tick()
            await self._turn(answers)

    async def close(self) -> None:
        """Commits what is there and keeps a snapshot; after `run` was cancelled."""
        try:
            await self._in_store_thread(self.core.commit)
            await self._in_store_thread(self.core.save_snapshot)
        except RacimoError as error:
            log.warning("no snapshot at the end: %s", error.message)
        await self._in_store_thread(self.core.store.close)
        self._store_thread.shutdown()

    def _apply(self, change: Change) -> tuple[Any, Exception | None]:
        try:
            return change(self.core), None
        except RacimoError as error:
            return None, error
        except Exception as error:  # noqa: BLE001 - goes to whoever asked; one bad call does not end the process
            return None, error

    async def _turn(self, answers: list[tuple[asyncio.Future[Any], Any, Exception | None]]) -> None:
        if self.core.state.seq > self.core.store.durable_seq:
            await self._commit(answers)
        self._publish()
        for answer, value, error in answers:
            if answer.done():
                continue
            if error is None:
                answer.set_result(value)
            else:
                answer.set_exception(error)

    async def _commit(self, answers: list[tuple[asyncio.Future[Any], Any, Exception | None]]) -> None:
        """Until it worked. On a full disk callers hear so at once, and it is tried again until there is space."""
        while True:
            try:
                await self._in_store_thread(self.core.commit)
            except RacimoError as error:
                if error.code != "disk-full":
                    raise
                if self.disk_full is None:
                    log.error("the journal cannot be written: %s", error.message)
                self.disk_full = error
                for answer, _, _ in answers:
                    if not answer.done():
                        answer.set_exception(error)
                while self._waiting:
                    answer = self._waiting.popleft()[1]
                    if not answer.done():
                        answer.set_exception(error)
                await asyncio.sleep(DISK_FULL_RETRY_S)  # nothing tells when a disk has space again
                continue
            if self.disk_full is not None:
                log.warning("the journal can be written again")
                self.disk_full = None
            return

    def _publish(self) -> None:
        effects = self.core.take_effects()
        if effects:
            self._carry(effects)
        if self.core.wants:
            self.on_wants()
        for run in {getattr(record.event, "run", "") for record in self.core.take_records()}:
            pulse = self._pulses.pop(run, None)
            if pulse is not None:
                pulse.set()

    async def _await_news(self) -> None:
        if self._waiting:
            return
        self._woken.clear()
        due_s = self.core.next_due_s
        if due_s is None:
            await self._woken.wait()
            return
        try:
            async with asyncio.timeout(max(SHORTEST_TIMER_S, due_s - self.core.clock.now_s())):
                await self._woken.wait()
        except TimeoutError:
            pass  # a decision is due

    async def _in_store_thread(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._store_thread, call)
