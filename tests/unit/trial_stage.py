"""A trial without a cluster: its worker's side, with slices given by hand and everything said kept."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from racimo.agent.protocol import Report, SliceDone, SliceOrder, WorkerContext
from racimo.agent.slices import newest_result
from racimo.spec.run import CheckpointSpec
from racimo.state.trials import Grant, Result
from racimo.worker.link import NoLink
from racimo.worker.train import run as current
from racimo.worker.tune.trial import Trial, TrialLeft


def slice_of(trial: int = 0, until: int = 0, number: int = 1, **fields: Any) -> SliceOrder:
    values = fields.pop("values", {"x": 0.5})
    prepaid_s = fields.pop("prepaid_s", 0.0)
    grant = Grant(number=number, trial=trial, worker=0, until=until, prepaid_s=prepaid_s)
    return SliceOrder(grant=grant, values=values, objectives=fields.pop("objectives", ("loss",)), **fields)


class TrialStage:
    """`following`: the slices that come after the first, None where the trial is to be left."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.directory = folder / "worker"
        self.directory.mkdir(parents=True, exist_ok=True)
        self.said: list[Report | SliceDone] = []
        self.following: list[SliceOrder | None] = []
        self.asked_to_leave = False

    @property
    def reports(self) -> list[Report]:
        return [message for message in self.said if isinstance(message, Report)]

    @property
    def results(self) -> list[Result]:
        return [message.result for message in self.said if isinstance(message, SliceDone)]

    @property
    def written(self) -> Result | None:
        done = newest_result(self.directory)
        return done.result if done is not None else None

    def trial(self, order: SliceOrder | None = None) -> Trial:
        return Trial(
            order or slice_of(),
            self.directory,
            self.said.append,
            lambda: self.following.pop(0) if self.following else None,
            lambda: self.asked_to_leave,
        )

    @contextlib.contextmanager
    def begun(self, order: SliceOrder | None = None) -> Iterator[current.Run]:
        """The trial's run, as `racimo.current_run()` is in it."""
        trial = self.trial(order)
        link: Any = NoLink(current.alone())
        run = current.begin_trial(self.context, link, trial, self.folder / "trials" / str(trial.number))
        try:
            yield run
        finally:
            run.end_trial()
            link.close()

    def call(self, function: Callable[[dict[str, Any]], Any], order: SliceOrder | None = None) -> Result:
        """One trial from its begin until it is left or over: what its last slice came to."""
        order = order or slice_of()
        with self.begun(order) as run:
            trial = run._trial
            assert trial is not None
            with contextlib.suppress(TrialLeft):
                trial.finish(function(dict(order.values)))
        return self.results[-1]

    @property
    def context(self) -> WorkerContext:
        return WorkerContext(
            worker="tiny-1/1/3", run="tiny-1", attempt=1, index=3, rank=0, world_size=1, least=1, most=1, seed=0,
            threads=1, devices=(0,), directory=str(self.directory), output_dir=str(self.folder),
            checkpoint=CheckpointSpec(), agent_socket="/nowhere", node="n1", host="host",
        )  # fmt: skip


def told(result: Result) -> dict[str, Any]:
    """What a test looks at first."""
    return {key: value for key, value in msgspec.to_builtins(result).items() if key in ("outcome", "rounds", "saved")}
