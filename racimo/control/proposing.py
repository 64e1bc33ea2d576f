"""Points for tune runs from processes that learn: asked for when a decision wants them, taken up as a fact.

Such a process runs beside a worker of its run, like an `exec` command, and ends with it. It keeps nothing that is not
in the journal: what it needs to know goes with each question, and what it answers is journalled before it counts. So
any of the processes may die at any time; the question is then put again, with the same answer.
"""

import asyncio
import itertools
import logging

import msgspec

from racimo.agent.propose_protocol import AskProposer, Proposed, ProposerAsk
from racimo.agent.protocol import WorkerOrder
from racimo.agent.pulse import Pulse
from racimo.control.carrier import Carrier
from racimo.control.core import FIRST_EXEC_INDEX
from racimo.control.loop import Loop
from racimo.control.secrets import SecretStore
from racimo.decide.tune.known import outcome_of
from racimo.spec.errors import RacimoError
from racimo.spec.proposer import MAX_COUNT, NUM_BEST, window_from
from racimo.spec.quantity import format_duration
from racimo.spec.study import StudySpec
from racimo.state.nouns import Exit, Failure, Run, Worker, worker_id
from racimo.state.study import Study

MODULE = "racimo.worker.tune.propose_process"
MAX_DEATHS = 6
"""Processes of a run that end one after the other without an answer, before the study fails."""
MAX_TELLINGS = 3
"""Times that one question is put: the second time with all that there is to know."""
FIRST_PAUSE_S, MOST_PAUSE_S = 0.1, 5.0
EXIT_WAIT_S = 2.0
WAKE_S = 3600.0
"""An upper bound of one wait; wants come by a pulse."""

log = logging.getLogger("racimo.control.proposing")


class _Process:
    """One proposing process, and what it was told."""

    def __init__(self, node: str, name: str, beside: int, exit: asyncio.Future[Exit]) -> None:
        self.node, self.name, self.beside, self.exit = node, name, beside, exit
        self.terms: StudySpec | None = None
        self.told_upto = -1
        """Number of the newest record that it knows of."""
        self.window: frozenset[int] = frozenset()

    def forget(self) -> None:
        """What it knows is not known any more."""
        self.terms, self.told_upto, self.window = None, -1, frozenset()


class Proposing:
    """A task for each run that wants points. Whoever made this runs it."""

    def __init__(self, loop: Loop, carrier: Carrier, secrets: SecretStore) -> None:
        self._loop, self._carrier, self._secrets = loop, carrier, secrets
        self._wanted = Pulse()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._processes: dict[str, _Process] = {}
        self._forgetting: set[asyncio.Task[None]] = set()
        self._numbers = itertools.count(1)
        loop.on_wants = self._wanted.beat

    async def run(self) -> None:
        """For ever."""
        try:
            while True:
                for run in self._loop.core.wants:
                    if run not in self._tasks:
                        self._begin(run)
                for run in [run for run in self._processes if run not in self._loop.core.state.open_runs]:
                    del self._processes[run]  # it has ended with its run's workers
                await self._wanted.wait(WAKE_S)
        finally:
            for task in self._tasks.values():
                task.cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def _begin(self, run: str) -> None:
        task = asyncio.create_task(self._serve(run), name=f"propose {run}")
        self._tasks[run] = task

        def done(task: asyncio.Task[None]) -> None:
            del self._tasks[run]
            if not task.cancelled() and task.exception() is not None:
                log.error("proposing for %s failed", run, exc_info=task.exception())

        task.add_done_callback(done)

    async def _serve(self, run: str) -> None:
        """Asks until nothing is wanted."""
        deaths, pause_s = 0, FIRST_PAUSE_S
        while (count := min(self._loop.core.wants.get(run, 0), MAX_COUNT)) > 0:
            try:
                await self._turn(run, count)
                deaths, pause_s = 0, FIRST_PAUSE_S
            except RacimoError as error:
                log.warning("asking for points of %s: %s", run, error.message)
                deaths += error.code == "not-found"
                if deaths >= MAX_DEATHS:
                    study = self._loop.core.state.studies[run]
                    await self._take(run, study.terms, len(study.trials), count, await self._died(run, deaths))
                    deaths = 0
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, MOST_PAUSE_S)

    async def _turn(self, run: str, count: int) -> None:
        """One question, and what came of it. `RacimoError` as `_ask`."""
        study = self._loop.core.state.studies[run]
        first, terms = len(study.trials), study.terms
        await self._take(run, terms, first, count, await self._ask(run, study, count))

    async def _take(self, run: str, terms: StudySpec, first: int, count: int, proposed: Proposed) -> None:
        failure = self._carrier.redactor(run).failure(proposed.failure)
        taken = msgspec.structs.replace(proposed, failure=failure)
        await self._carrier.until_written(lambda core: core.take_proposals(run, terms, first, count, taken))

    async def _ask(self, run_id: str, study: Study, count: int) -> Proposed:
        """Its answer. `RacimoError`: `not-found` if the process has ended, else its node does not answer."""
        process = await self._process(self._loop.core.state.runs[run_id])
        limit_s = study.terms.metric_within_s
        try:
            async with asyncio.timeout(limit_s):
                for _ in range(MAX_TELLINGS):
                    reply = await self._put(process, run_id, study, count)
                    if not reply.missing and not reply.needs_terms:
                        return reply
        except TimeoutError:
            await self._end(process)
            return Proposed(number=0, failure=_late(study, limit_s))
        await self._end(process)
        raise RacimoError("not-found", f"{process.name} does not know what it was told")

    async def _put(self, process: _Process, run: str, study: Study, count: int) -> Proposed:
        """The question, and word of what changed since the last answer; of all, if that process turns out to be new."""
        ask, window = self._question(process, run, study, count)
        upto, terms = self._loop.core.state.seq, study.terms
        process.forget()  # until it has answered
        reply = await self._carrier.request(process.node, AskProposer(worker=process.name, ask=ask))
        assert isinstance(reply, Proposed)
        if not reply.missing and not reply.needs_terms and reply.failure is None:
            process.terms, process.told_upto, process.window = terms, upto, window
        return reply

    def _question(self, process: _Process, run: str, study: Study, count: int) -> tuple[ProposerAsk, frozenset[int]]:
        """What is asked, with what the process does not know yet; and all trials that it is to know."""
        first = len(study.trials)
        newest_from = window_from(first)
        best = sorted(number for _, number in study.ranking[:NUM_BEST] if number < newest_from)
        window = frozenset((*best, *range(newest_from, first)))
        same = process.terms is study.terms
        if same:
            changed = {trial.number for trial in study.changed_since(process.told_upto)} & window
            tell = sorted(changed | (window - process.window))
        else:
            tell = sorted(window)
        ask = ProposerAsk(
            number=next(self._numbers),
            first=first,
            count=count,
            seed=self._loop.core.state.runs[run].spec.seed,
            newest_from=newest_from,
            best=tuple(best),
            outcomes=tuple(outcome_of(study.trials[number], study.levels) for number in tell),
            terms=None if same else msgspec.structs.replace(study.terms, points=(), defaults={}),
        )
        return ask, window

    # Processes

    async def _process(self, run: Run) -> _Process:
        """The run's process, begun if there is none. `RacimoError` unreachable if no worker is there to be beside."""
        known = self._processes.get(run.id)
        if known is not None and not known.exit.done():
            beside = run.workers.get(known.beside)
            if beside is not None and beside.live and known.name.startswith(f"{run.id}/{run.attempt}/"):
                return known
        beside = self._host(run)
        index = FIRST_EXEC_INDEX + int(self._loop.core.clock.now_s() * 1000) * 1000 + next(self._numbers) % 1000
        order = WorkerOrder(
            worker=worker_id(run.id, run.attempt, index),
            kind="exec",
            command=("python", "-m", MODULE),
            variables=run.spec.variables,
            secrets=self._secrets.values(run.spec.secrets),
            exec_of=worker_id(run.id, beside.attempt, beside.index),
        )
        exit_ = asyncio.ensure_future(await self._carrier.start_exec(beside.node, order))
        process = _Process(beside.node, order.worker, beside.index, exit_)
        self._processes[run.id] = process
        exit_.add_done_callback(lambda _: self._forget_later(process))
        return process

    def _host(self, run: Run) -> Worker:
        there = self._carrier.connected_nodes
        for worker in run.live_workers:
            if worker.status == "ready" and not worker.leaving and worker.node in there:
                return worker
        raise RacimoError("unreachable", f"no worker of {run.id} can be reached", "racimo nodes")

    def _forget_later(self, process: _Process) -> None:
        if not process.exit.cancelled():
            task = asyncio.create_task(self._carrier.forget_exec(process.node, process.name), name="forget proposer")
            self._forgetting.add(task)
            task.add_done_callback(self._forgetting.discard)

    async def _end(self, process: _Process) -> None:
        await self._carrier.forget_exec(process.node, process.name)
        process.exit.cancel()

    async def _died(self, run: str, deaths: int) -> Proposed:
        known = self._processes.get(run)
        if known is not None:
            await asyncio.wait({known.exit}, timeout=EXIT_WAIT_S)  # word of it comes another way than the refusal
        over = known is not None and known.exit.done() and not known.exit.cancelled()
        ending = known.exit.result() if known is not None and over else None
        how = ""
        if ending is not None and ending.failure is not None:
            how = f": {ending.failure.message}"
        elif ending is not None:
            how = f": signal {ending.signal}" if ending.signal else f": exit code {ending.code}"
        message = f"the proposing process ended {deaths} times without an answer{how}"
        return Proposed(number=0, failure=Failure(code="proposer-failed", message=message, hint=f"racimo logs {run}"))


def _late(study: Study, limit_s: float) -> Failure:
    message = f"the proposer {study.terms.proposer} gave no point within {format_duration(limit_s)}"
    return Failure(code="proposer-failed", message=message, hint="raise study.metric_within, or propose faster")
