"""`for step in run.steps(...)`: the loop that resumes, heals and resizes."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from racimo.spec.errors import RacimoError
from racimo.worker.train.batches import Batch
from racimo.worker.train.messages import Outcome

if TYPE_CHECKING:
    from racimo.worker.train.crew import Crew


class Step:
    """One update of the model.

    Iterate over it for the micro-shards that fall to this worker, call `backward` once for each; when the iterator
    ends, every `.grad` holds the gradient of the whole global batch. Then `apply`.
    """

    def __init__(self, number: int, epoch: int, crew: "Crew") -> None:
        self.number = number
        """From 1; after `apply`, the number of updates the model has had."""
        self.epoch = epoch
        """The pass over the data, from 0."""
        self._crew = crew
        self._outcome: Outcome | None = None
        self._batch: Batch | None = None
        self._iterating = False
        self.applied = False

    @property
    def loss(self) -> float:
        """Weighted mean loss over the whole global batch, the same on all workers; known once the loop has ended."""
        if self._outcome is None:
            raise misused("step.loss is known only after the loop over the step has ended")
        return self._outcome.loss

    @property
    def num_samples(self) -> int:
        """Samples in the global batch; known once the loop has ended."""
        if self._outcome is None:
            raise misused("step.num_samples is known only after the loop over the step has ended")
        return self._outcome.num_samples

    def __iter__(self) -> Iterator[Batch]:
        if self._iterating:
            raise misused(f"the loop over step {self.number} was begun twice")
        self._iterating = True
        for batch in self._crew.micro_shards():
            self._batch = batch
            yield batch
            if self._batch is not None:
                raise misused(f"micro-shard {batch.index} of step {self.number} had no step.backward(loss)")
        self._outcome = self._crew.outcome

    def backward(self, loss: torch.Tensor, weight: float | None = None) -> None:
        """Backward pass of the present micro-shard. `loss` is the mean over what `weight` counts: the samples of the
        micro-shard unless given (tokens, say). The step's gradient is that of the weighted mean of all losses."""
        if self._batch is None:
            raise misused("step.backward(loss) is called once for each micro-shard, inside the loop over the step")
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise misused(f"step.backward takes a loss of one element, not {getattr(loss, 'shape', type(loss))}")
        batch, self._batch = self._batch, None
        self._crew.backward(batch, loss, None if weight is None else float(weight))

    def apply(self) -> None:
        """`step()` of each optimizer, then the commit. Once per step, after the loop over it has ended."""
        if self._outcome is None:
            raise misused(f"step.apply() came before the loop over step {self.number} had ended")
        if self.applied:
            raise misused(f"step.apply() was called twice for step {self.number}")
        self._crew.apply(self._outcome)
        self.applied = True


def misused(message: str) -> RacimoError:
    return RacimoError("steps-misused", message, "see the first example in the README")


def steps(crew: "Crew") -> Iterator[Step]:
    """Yields steps until all that were asked for are committed by the run (not by this worker)."""
    finished = False
    try:
        crew.enter()
        while crew.boundary():
            step = Step(crew.step + 1, crew.batches.epoch_of(crew.step), crew)
            yield step
            if not step.applied:
                raise misused(f"step {step.number} was not applied before the next one")
        finished = True
    finally:
        crew.leave(finished)
