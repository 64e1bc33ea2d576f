"""Proposals through the real control process: asked beside a worker, again after deaths, and never twice."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from control_stage import FakeAgent, Stage, stage

from racimo.act.journal import MemoryDisk, MemoryJournal
from racimo.agent import protocol
from racimo.agent.propose_protocol import AskProposer, Proposed, ProposerAsk
from racimo.control import proposing
from racimo.control.core import FIRST_EXEC_INDEX
from racimo.control.proposing import Proposing
from racimo.decide.tune.draw import NUM_FIRST_RANDOM
from racimo.spec.run import RunSpec
from racimo.spec.study import StudySpec
from racimo.state import events as ev
from racimo.state.nouns import Failure, parse_worker_id
from racimo.state.trials import Proposal, Result

WAIT_S = 20.0


class TuneAgent:
    """Makes the fake agent run slices at once and propose: what it was asked is kept."""

    def __init__(self, agent: FakeAgent) -> None:
        self.agent = agent
        self.asks: list[ProposerAsk] = []
        self.known: dict[str, set[int]] = {}
        """By proposing process, the trials that it was told of."""
        self.hangs = 0
        self.dies = 0
        """So many questions are not answered: the process ends instead."""
        self.failure: Failure | None = None
        self.x_of_trial = lambda number: 0.5 + number / 10_000
        self._do = agent._do
        agent._do = self.do  # type: ignore[method-assign]

    @property
    def processes(self) -> list[str]:
        return [order.worker for order in self.agent.orders if order.kind == "exec"]

    async def do(self, body: protocol.RequestBody) -> protocol.ReplyBody:
        if isinstance(body, AskProposer):
            return await self.propose(body)
        reply = await self._do(body)
        if isinstance(body, protocol.StartWorker) and body.order.kind == "tune":
            run, attempt, index = parse_worker_id(body.order.worker)
            ready = ev.WorkerReady(run=run, attempt=attempt, index=index, address="", micro_shards=10_000, numerics="")
            self.agent.emit(ready)
        if isinstance(body, protocol.RunSlice):
            run, attempt, index = parse_worker_id(body.worker)
            grant = body.order.grant
            result = Result(
                outcome="finished", rounds=1, step=1, metrics={"loss": float(body.order.values["x"])},  # type: ignore[arg-type]
                curve=((1, 1.0),), worked_s=5.0,
            )  # fmt: skip
            self.agent.emit(ev.SliceEnded(run=run, attempt=attempt, index=index, number=grant.number, result=result))
        if isinstance(body, protocol.StopWorker) and body.how in ("release", "pause"):
            self.agent.exited(body.worker)
        return reply

    async def propose(self, body: AskProposer) -> protocol.ReplyBody:
        ended = protocol.Refused(code="not-found", message="it does not live here (any more)")
        self.asks.append(body.ask)
        if self.hangs:
            self.hangs -= 1
            await asyncio.sleep(3600.0)
        if self.dies:
            self.dies -= 1
            self.agent.exited(body.worker, 1)
        if body.worker not in self.agent.live:
            return ended
        ask = body.ask
        if ask.terms is None and body.worker not in self.known:
            return Proposed(number=ask.number, needs_terms=True)
        known = self.known.setdefault(body.worker, set())
        known |= {outcome.number for outcome in ask.outcomes}
        missing = set(range(ask.newest_from, ask.first)) - known
        if missing:
            return Proposed(number=ask.number, missing=tuple(sorted(missing)))
        if self.failure is not None:
            return Proposed(number=ask.number, failure=self.failure)
        numbers = range(ask.first, ask.first + ask.count)
        points = tuple(Proposal(values={"x": self.x_of_trial(number)}, by="tpe") for number in numbers)
        return Proposed(number=ask.number, proposals=points)


@contextmanager
def quick_pauses() -> Iterator[None]:
    patch = pytest.MonkeyPatch()
    patch.setattr(proposing, "FIRST_PAUSE_S", 0.001)
    patch.setattr(proposing, "MOST_PAUSE_S", 0.002)
    try:
        yield
    finally:
        patch.undo()


async def submit(made: Stage, trials: int, **terms: Any) -> str:
    study = StudySpec(
        space={"x": "0.0..1.0"}, metric="loss", proposer="tpe", scheduler="none", trials=trials, parallel=2, **terms
    )
    run = await made.loop.change(lambda core: core.submit(RunSpec(tune="t.py:f", study=study), "request"))
    return run.id


async def ended(made: Stage, run: str) -> Any:
    async with asyncio.timeout(WAIT_S):
        while True:
            pulse = made.loop.pulse(run)
            if made.core.state.runs[run].ended:
                return made.core.state.runs[run]
            await pulse.wait()


def play(
    root: Path, trials: int, prepare: Any = None, meanwhile: Any = None, **terms: Any
) -> tuple[Any, TuneAgent, Stage]:
    """A whole study; the run at its end, the agent, the stage."""

    async def check() -> tuple[Any, TuneAgent, Stage]:
        async with stage(root) as made:
            agent = TuneAgent(made.agent)
            if prepare is not None:
                prepare(agent)
            task = asyncio.create_task(Proposing(made.loop, made.carrier, made.secrets).run())
            try:
                run = await submit(made, trials, **terms)
                if meanwhile is not None:
                    await meanwhile(made, agent, run)
                return await ended(made, run), agent, made
            finally:
                assert not task.done(), task
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    with quick_pauses():
        return asyncio.run(check())


def test_after_the_random_start_every_point_is_the_proposers(tmp_path: Path) -> None:
    run, agent, made = play(tmp_path, 40)
    trials = made.core.state.studies[run.id].trials
    assert run.status == "succeeded" and len(trials) == 40
    assert [trial.by for trial in trials] == ["random"] * NUM_FIRST_RANDOM + ["tpe"] * 30
    assert [trial.values["x"] for trial in trials[NUM_FIRST_RANDOM:]] == [0.5 + n / 10_000 for n in range(10, 40)]
    (process,) = agent.processes
    (order,) = [order for order in agent.agent.orders if order.kind == "exec"]
    assert order.command[1:] == ("-m", "racimo.worker.tune.propose_process")
    assert order.exec_of.startswith(f"{run.id}/1/") and parse_worker_id(process)[2] >= FIRST_EXEC_INDEX


def test_only_what_changed_is_told_again(tmp_path: Path) -> None:
    _, agent, _ = play(tmp_path, 40)
    assert agent.asks[0].terms is not None and len(agent.asks[0].outcomes) == NUM_FIRST_RANDOM
    assert all(ask.terms is None and len(ask.outcomes) <= 6 for ask in agent.asks[1:])
    told_last = {outcome.number: outcome for ask in agent.asks for outcome in ask.outcomes}
    assert sum(outcome.status == "finished" for outcome in told_last.values()) >= 36


def test_a_process_that_dies_is_followed_by_another_and_no_trial_is_lost(tmp_path: Path) -> None:
    def dies_thrice(agent: TuneAgent) -> None:
        agent.dies = 3

    run, agent, made = play(tmp_path, 30, dies_thrice)
    assert run.status == "succeeded" and len(agent.processes) == len(set(agent.processes)) == 4
    xs = [trial.values["x"] for trial in made.core.state.studies[run.id].trials[NUM_FIRST_RANDOM:]]
    assert xs == [0.5 + n / 10_000 for n in range(10, 30)]


def test_a_proposer_that_always_dies_fails_the_study(tmp_path: Path) -> None:
    def dies(agent: TuneAgent) -> None:
        agent.dies = 1_000

    run, agent, _ = play(tmp_path, 30, dies)
    assert run.status == "failed" and run.failure.code == "proposer-failed"
    assert "the proposing process ended 6 times without an answer: exit code 1" in run.failure.message
    assert len(agent.processes) == proposing.MAX_DEATHS


def test_a_failure_of_the_proposer_ends_the_study_with_it(tmp_path: Path) -> None:
    failure = Failure(code="proposer-failed", message="own.py:Own raised KeyError: 'x'", traceback="Traceback: ...")

    def fails(agent: TuneAgent) -> None:
        agent.failure = failure

    run, _, _ = play(tmp_path, 30, fails)
    assert (run.status, run.failure) == ("failed", failure)


def test_a_proposer_that_does_not_answer_is_named_after_the_limit(tmp_path: Path) -> None:
    def hangs(agent: TuneAgent) -> None:
        agent.hangs = 1

    run, _, _ = play(tmp_path, 30, hangs, metric_within="0.2s")
    assert run.status == "failed" and "the proposer tpe gave no point within 0.2s" in run.failure.message


def test_an_agent_that_comes_back_is_asked_again(tmp_path: Path) -> None:
    async def restart(made: Stage, agent: TuneAgent, run: str) -> None:
        async with asyncio.timeout(WAIT_S):
            while len(made.core.state.studies[run].trials) < 15:
                await made.loop.pulse(run).wait()
        await agent.agent.die()
        await agent.agent.listen()

    run, _, made = play(tmp_path, 40, None, restart)
    assert run.status == "succeeded" and len(made.core.state.studies[run.id].trials) == 40


def test_another_control_process_asks_for_what_is_missing_and_nothing_else(tmp_path: Path) -> None:
    """Proposals are journalled: ray#30861, where a restore swaps the searcher for random."""
    disk = MemoryDisk()

    async def until(made: Stage, run: str, count: int) -> None:
        async with asyncio.timeout(WAIT_S):
            while len(made.core.state.studies[run].trials) < count:
                await made.loop.pulse(run).wait()

    async def check() -> None:
        async with stage(tmp_path / "one", MemoryJournal(disk)) as made:
            TuneAgent(made.agent)
            task = asyncio.create_task(Proposing(made.loop, made.carrier, made.secrets).run())
            run = await submit(made, 40)
            await until(made, run, 20)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        async with stage(tmp_path / "two", MemoryJournal(disk)) as again:
            agent = TuneAgent(again.agent)
            before = [trial.values for trial in again.core.state.studies[run].trials]
            task = asyncio.create_task(Proposing(again.loop, again.carrier, again.secrets).run())
            await ended(again, run)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            trials = again.core.state.studies[run].trials
            assert [trial.values for trial in trials[: len(before)]] == before
            assert [trial.values["x"] for trial in trials[10:]] == [0.5 + n / 10_000 for n in range(10, 40)]
            assert min((ask.first for ask in agent.asks), default=40) >= len(before)

    with quick_pauses():
        asyncio.run(check())
