"""`racimo.current_run()`: the run that this process is a worker of, or a run of its own outside a cluster."""

import atexit
import hashlib
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from racimo.agent.protocol import Member, NewGeneration, Report, WorkerContext
from racimo.spec.errors import RacimoError
from racimo.spec.home import MAX_SOCKET_PATH_BYTES
from racimo.spec.run import CheckpointSpec
from racimo.state.nouns import worker_id
from racimo.worker.context import WorkerLeaving, load_context
from racimo.worker.link import AgentLink, Link, NoLink
from racimo.worker.train import seeds
from racimo.worker.train.batches import Batches
from racimo.worker.train.checkpoint import Shelf
from racimo.worker.train.crew import Crew
from racimo.worker.train.position import Plan
from racimo.worker.train.refuse import refuse_what_cannot_be_kept
from racimo.worker.train.saver import Place, Saver
from racimo.worker.train.state import Stateful, Trained, hash_state
from racimo.worker.train.steps import Step, misused, steps
from racimo.worker.train.telemetry import Telemetry
from racimo.worker.train.tree import default_micro_shards
from racimo.worker.tune.keeper import Keeper
from racimo.worker.tune.numbers import numbers, step_number
from racimo.worker.tune.rounds import Rounds

if TYPE_CHECKING:
    from racimo.worker.tune.lane import TrialLink
    from racimo.worker.tune.trial import Trial

CHECK_EVERY_STEPS = 50
MOST_MICRO_SHARDS = 1024
"""Beyond this the descriptions of micro-shards no longer fit into one packet between peers."""
LOCAL_RUN = "local"

_current: "Run | None" = None
_between_trials = False
"""This is a worker of a tune run: outside of a trial it has no run."""
_THREAD_RUN = "_racimo_run"
"""Attribute of a thread: the trial that it was started in, which it belongs to for good."""


def current_run() -> "Run":
    """The run of this process. The first call outside a cluster seeds torch, numpy and `random` as a worker's are.

    In a tune run it is the trial at hand; for a thread, the trial in which it was started."""
    global _current
    started_in: Run | None = getattr(threading.current_thread(), _THREAD_RUN, None)
    if started_in is not None:
        return started_in
    if _current is None:
        if _between_trials:
            raise RacimoError("steps-misused", "there is no run between two trials", "call it inside of the function")
        _current = Run(load_context())
        atexit.register(_current.close)
    return _current


def serve_trials() -> None:
    """From here on this process runs trials: each thread belongs to the trial in which it is started."""
    global _between_trials
    _between_trials = True
    start = threading.Thread.start

    def start_in_trial(thread: threading.Thread) -> None:
        setattr(thread, _THREAD_RUN, getattr(threading.current_thread(), _THREAD_RUN, None) or _current)
        start(thread)

    threading.Thread.start = start_in_trial  # type: ignore[method-assign, assignment]


def begin_trial(context: WorkerContext, link: "TrialLink", trial: "Trial", folder: Path) -> "Run":
    """From here on `current_run()` is this trial, until it ends."""
    global _current
    _current = Run(context, link, trial, folder)
    return _current


class Run:
    """What user code sees of its run, or of its trial in a tune run."""

    def __init__(
        self,
        context: WorkerContext | None,
        link: Link | None = None,
        trial: "Trial | None" = None,
        folder: Path | None = None,
    ) -> None:
        self._context = context
        self._trial = trial
        self.id = context.run if context else LOCAL_RUN
        self.attempt = context.attempt if context else 1
        self._seat = (context.rank, context.world_size) if context and trial is None else (0, 1)
        self.output_dir = folder or Path(context.output_dir if context else os.environ.get("RACIMO_OUTPUT_DIR", "."))
        self.seed = context.seed if context else 0
        self._link: Link = link or (AgentLink(context) if context else NoLink(alone()))
        self._crew: Crew | None = None
        self._loops = 0
        self._running = False
        self._closed = False
        self._step = 0
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if trial is None:
            torch.manual_seed(self.seed)  # devices that are begun later, too; for trials their worker did it once
        seeds.seed_all(self.seed)

    @property
    def rank(self) -> int:
        """This worker's place among those of the present (after the loop: the last) generation; 0 is always somebody's.

        It changes when workers die or join. Before `steps` it is the place in the attempt as first planned."""
        return self._now[0]

    @property
    def num_workers(self) -> int:
        """How many workers share the present generation."""
        return self._now[1]

    @property
    def _now(self) -> tuple[int, int]:
        seat = self._crew.seat if self._crew is not None else self._seat
        return seat if seat[1] else self._seat

    def steps(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        batches: Batches,
        until: int,
        *,
        state: Mapping[str, Stateful] | None = None,
        coherence: str = "exact",
        check_every: int = CHECK_EVERY_STEPS,
        checkpoint: CheckpointSpec | None = None,
        resume_from: str = "",
    ) -> Iterator[Step]:
        """The loop that trains: yields `Step`s until the run has committed `until` of them.

        `optimizer` may be a tuple of several; `step.apply()` steps each, and nothing else may. Which parameters are
        trainable is settled before. `state` holds whatever else has `state_dict` and `load_state_dict`.
        `coherence="exact"` gives the same bits on any number of workers; with `"fast"` every sample still counts once.
        `check_every`: steps between comparisons of the weights and buffers across workers, besides those before each
        checkpoint, after a change of workers and at the end; 0 for never. `checkpoint` replaces what the run was
        submitted with (outside a cluster there is none otherwise); a relative `to` lies in the output folder.
        `resume_from` names a checkpoint, or a folder of some, of another run.

        Raises `RacimoError` at the first step: see the codes under "Training" in docs/errors.md.
        """
        if coherence not in ("exact", "fast"):
            raise misused(f'coherence is "exact" or "fast", not {coherence!r}')
        if not isinstance(batches, Batches):
            raise misused(f"run.steps takes racimo.Batches as its third argument, not a {type(batches).__name__}")
        if self._running:
            raise misused("run.steps was begun inside another loop over run.steps")
        if self._loops and self._context:
            raise misused("a worker goes through run.steps once; a second loop is another run")
        optimizers = tuple(optimizer) if isinstance(optimizer, list | tuple) else (optimizer,)
        refuse_what_cannot_be_kept(model, optimizers, state or {}, coherence == "exact")
        micro_shards = self._micro_shards(batches)
        trained = Trained(model, optimizers, dict(state or {}))
        plan = Plan(
            batches=batches,
            until=until,
            micro_shards=micro_shards,
            exact=coherence == "exact",
            check_every=check_every,
            place=self._place(checkpoint, resume_from),
            keeper=Keeper(self._trial, self.output_dir) if self._trial is not None else None,
        )
        return self._loop(trained, plan)

    def _loop(self, trained: Trained, plan: Plan) -> Iterator[Step]:
        self._running = True
        self._loops += 1
        context = self._context
        meets = context if self._trial is None else None  # a trial of one worker trains alone
        worker = meets.worker if meets else worker_id(LOCAL_RUN, 1, 0)
        teller = context.worker if context else worker
        shelf = Shelf(plan.place.root, self.attempt if context else 0) if plan.place.spec is not None else None
        crew = Crew(
            worker=worker,
            link=self._link,
            listener_path=_listener_path(meets) if meets else None,
            node=meets.node if meets else "",
            trained=trained,
            plan=plan,
            telemetry=Telemetry(teller, self._link, context.directory if context else "", plan.until, bool(meets)),
            saver=Saver(plan.place.spec, shelf, self.id, self._link),
        )
        self._crew = crew
        try:
            yield from steps(crew)
        except WorkerLeaving:
            self.close()  # the process ends without the usual ways; what was reported last must not be lost
            raise
        finally:
            self._step = crew.step
            self._seat = crew.seat
            self._crew = None
            self._running = False

    def report(self, step: int | None = None, **values: float) -> None:
        """Records numbers under their names at the present step (or the given one). Any worker may call it, or none:
        the first value of each step and name counts. Never waits, except in a trial at the end of its slice, where
        the trial may also be left: then it does not return.

        `RacimoError` `metric-invalid` for a value that is no number."""
        told = numbers(values)
        if step is not None:
            step = step_number(step)
        elif self._crew is not None:
            step = self._crew.step
        elif self._trial is None or self._running:
            step = self._step
        if self._trial is not None:
            self._trial.report(step, told)
        elif step is not None:
            self._link.tell(Report(step=step, values=told))

    def rounds(self, until: int, state: dict[str, Any] | None = None) -> Iterator[int]:
        """A loop of whole rounds, from 1 to `until`, for what is no `run.steps` loop: it goes on where it was.

        After each round `state`, a dict that the loop changes as it likes, is what the run goes on from: values with
        `state_dict` and `load_state_dict` by these, all others pickled. Outside a cluster nothing is kept. Each round
        begins with torch, numpy and `random` seeded by its number. It is for one worker: several share `steps`.

        ```python
        state = {"model": SGDClassifier(alpha=config["alpha"])}
        for _ in run.rounds(30, state):
            state["model"].partial_fit(X, y, classes)
            run.report(accuracy=state["model"].score(V, w))
        ```
        """
        if self._running:
            raise misused("run.rounds was begun inside another loop")
        if self._loops and self._context:
            raise misused("a worker goes through one loop of its run; a second one is another run")
        if self._trial is None and self.num_workers > 1:
            raise misused(f"run.rounds is for one worker, and there are {self.num_workers}: run.steps shares the work")
        self._loops += 1
        rounds = Rounds(self.output_dir if self._context else None, until, {} if state is None else state, self.seed)
        return self._rounds_of_trial(rounds, self._trial) if self._trial is not None else self._rounds_of_run(rounds)

    def _rounds_of_run(self, rounds: Rounds) -> Iterator[int]:
        rounds.restore()
        self._running = True
        try:
            for number in rounds.numbers:
                self._step = number
                yield number
                rounds.end_round(None)
                if self._link.pause_requested or self._link.leave_requested:
                    rounds.save(None)
                    raise WorkerLeaving("paused" if self._link.pause_requested else "released")
            rounds.save(None)
        except WorkerLeaving:
            self.close()
            raise
        finally:
            self._running = False

    def _rounds_of_trial(self, rounds: Rounds, trial: "Trial") -> Iterator[int]:
        trial.take_up(rounds.restore())
        trial.keep, trial.looping = lambda: rounds.save(trial.told_values, trial.told.rounds), True
        self._running = True
        try:
            trial.boundary()  # asked to leave before it has begun, or it was further than was known
            for number in rounds.numbers:
                self._step = number
                yield number
                rounds.end_round(trial.told_values, trial.told.rounds, trial.note_saved)
                trial.boundary()
            rounds.save(trial.told_values, trial.told.rounds)
            trial.note_saved()
        finally:
            trial.keep, trial.looping = None, False
            self._running = False

    def state_hash(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        state: Mapping[str, Stateful] | None = None,
    ) -> str:
        """SHA-256 over weights, optimizer and other state; see `racimo.hash_state`."""
        return hash_state(model, optimizer, state)

    def close(self) -> None:
        """Sends what is still to be sent to the agent, for a bounded time. Happens at exit by itself."""
        if not self._closed:
            self._closed = True
            self._link.close()

    def end_trial(self) -> None:
        """The trial is over: whoever still holds this run cannot report any more, and what a loop that was left held is
        given back."""
        global _current
        if self._crew is not None:
            self._crew.leave(False)
            self._crew = None
        if _current is self:
            _current = None

    def _micro_shards(self, batches: Batches) -> int:
        most = self._context.most if self._context and self._trial is None else 1
        micro_shards = batches.micro_shards or default_micro_shards(most)
        if micro_shards > MOST_MICRO_SHARDS:
            raise misused(f"micro_shards is at most {MOST_MICRO_SHARDS}, not {micro_shards}")
        if most > micro_shards:
            raise RacimoError(
                "too-many-workers",
                f"{most} workers share {micro_shards} micro-shards per step: some would have nothing to do",
                f"use Batches(..., micro_shards={default_micro_shards(most)}), or at most {micro_shards} workers",
            )
        return micro_shards

    def _place(self, checkpoint: CheckpointSpec | None, resume_from: str) -> Place:
        # A trial is kept by its `Keeper`; checkpoints beside that are written where its function asks for them.
        spec = checkpoint or (self._context.checkpoint if self._context and self._trial is None else None)
        root = str(self.output_dir / "checkpoints")
        if spec is not None and "://" in spec.to and not spec.to.startswith("file://"):
            root = f"{spec.to.rstrip('/')}/{self.id}" if self._context else spec.to
        elif spec is not None and spec.to:
            folder = Path(spec.to.removeprefix("file://")).expanduser()
            # Relative to what all attempts share. The working directory is one attempt's own.
            root = str(folder / self.id if folder.is_absolute() and self._context else self.output_dir / folder)
        if self._context and root.startswith("memory://"):
            raise RacimoError(
                "checkpoint-failed",
                f"checkpoints at {spec.to if spec else root} end with the process that wrote them",
                "set checkpoint.to to a folder, or leave it out",
            )
        if spec is not None:
            Shelf(root).reach()
        return Place(spec, root, resume_from)


def alone() -> NewGeneration:
    """One member, outside a cluster or in a trial."""
    member = Member(worker=worker_id(LOCAL_RUN, 1, 0), address="")
    return NewGeneration(attempt=1, number=1, members=(member,), reason="alone")


def _listener_path(context: WorkerContext) -> Path:
    """In the worker's own folder; beside the agent's socket where that path would be too long for a socket."""
    path = Path(context.directory) / "peer.sock"
    if len(os.fsencode(path)) <= MAX_SOCKET_PATH_BYTES:
        return path
    digest = hashlib.sha256(context.worker.encode()).hexdigest()[:8]
    return Path(context.agent_socket).parent / f"p-{digest}"
