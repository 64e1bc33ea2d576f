"""Questions for the processes that propose points: passed on over their connections, and never left open."""

import asyncio

from racimo.agent.entry import Entry
from racimo.agent.frames import encode_frame
from racimo.agent.propose_protocol import AskProposer, Proposed, ProposerAsk
from racimo.agent.pulse import Pulse
from racimo.agent.workers import Workers
from racimo.spec.errors import RacimoError


class Proposers:
    """One open question for each process; it is sent again if the process has to connect again."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self._open: dict[str, tuple[ProposerAsk, asyncio.Future[Proposed]]] = {}

    async def ask(self, message: AskProposer) -> Proposed:
        """Waits for the answer as long as the process lives. `RacimoError`: `not-found` if it does not, or no more;
        `wrong-state` if another question took the place of this one."""
        entry = self._workers.entries.get(message.worker)
        if entry is None or not entry.live:
            raise _ended(message.worker)
        answer: asyncio.Future[Proposed] = asyncio.get_running_loop().create_future()
        self._give_up(message.worker, RacimoError("wrong-state", f"{message.worker} was asked something else since"))
        self._open[message.worker] = message.ask, answer
        end = Pulse()
        end.listeners.add(lambda: _fail(answer, _ended(message.worker)))
        entry.followers.add(end)
        try:
            entry.send(encode_frame(message.ask))
            return await answer
        finally:
            entry.followers.discard(end)
            known = self._open.get(message.worker)
            if known is not None and known[1] is answer:
                del self._open[message.worker]

    def connected(self, entry: Entry) -> None:
        """The process is there (again)."""
        known = self._open.get(entry.name)
        if known is not None:
            entry.send(encode_frame(known[0]))

    def said(self, worker: str, message: Proposed) -> None:
        """An answer; to a question that nobody has any more it is dropped."""
        known = self._open.get(worker)
        if known is not None and known[0].number == message.number and not known[1].done():
            known[1].set_result(message)

    def _give_up(self, worker: str, error: RacimoError) -> None:
        known = self._open.pop(worker, None)
        if known is not None:
            _fail(known[1], error)


def _fail(answer: asyncio.Future[Proposed], error: RacimoError) -> None:
    if not answer.done():
        answer.set_exception(error)


def _ended(worker: str) -> RacimoError:
    return RacimoError("not-found", f"the process {worker} does not live here (any more)")
