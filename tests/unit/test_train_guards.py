"""What user code does inside its loop is refused where it would break the promise without a sign."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from racimo.spec.errors import RacimoError
from racimo.spec.run import CheckpointSpec
from racimo.worker.train.batches import Batches
from racimo.worker.train.run import Run
from racimo.worker.train.state import hash_state


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    monkeypatch.setenv("RACIMO_OUTPUT_DIR", str(tmp_path))
    run = Run(None)
    yield run
    run.close()


class RunningMean(torch.nn.Module):
    """`how` says what forward does with its buffer."""

    mean: torch.Tensor

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.linear = torch.nn.Linear(4, 1)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("mask", None, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "in place":
            self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        elif self.how == "replaced":
            self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        elif self.how == "made once" and self.mask is None:
            self.mask = torch.ones(4)
        result: torch.Tensor = self.linear(x - self.mean)
        return result


def batches() -> Batches:
    generator = torch.Generator().manual_seed(0)
    return Batches(torch.randn(32, 4, generator=generator), global_batch_size=16, micro_shards=4)


def train(
    run: Run,
    model: torch.nn.Module,
    optimizer: Any = None,
    between: Callable[[Any], None] = lambda _: None,
    after: Callable[[Any], None] = lambda _: None,
    before: Callable[[Any], None] = lambda _: None,
    **kwargs: Any,
) -> None:
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.01)
    for step in run.steps(model, optimizer, batches(), **({"until": 4} | kwargs)):
        before(step)
        for batch in step:
            step.backward(model(batch.data).square().mean())
        between(step)
        step.apply()
        after(step)


NORM = torch.nn.Sequential(
    torch.nn.Unflatten(1, (2, 2)), torch.nn.InstanceNorm1d(2, track_running_stats=True), torch.nn.Flatten(),
    torch.nn.Linear(4, 1),
)  # fmt: skip


@pytest.mark.parametrize(
    ("model", "buffer"),
    [
        (RunningMean("in place"), "the buffer mean changed"),
        (RunningMean("replaced"), "the buffer mean changed"),
        (torch.nn.Sequential(RunningMean("in place")), "the buffer 0.mean changed"),
        (NORM, "the buffer 1.running_mean changed"),
        (torch.nn.utils.parametrizations.spectral_norm(torch.nn.Linear(4, 1)), r"parametrizations.weight.0._u changed"),
    ],
)
def test_a_buffer_that_forward_changes_is_refused_by_name(run: Run, model: torch.nn.Module, buffer: str) -> None:
    with pytest.raises(RacimoError, match=buffer) as raised:
        train(run, model)
    assert raised.value.code == "not-exact"


def test_buffers_that_forward_leaves_alone_or_only_makes_are_allowed(run: Run) -> None:
    train(run, RunningMean("read"))
    train(run, RunningMean("made once"))
    train(run, NORM.eval())
    train(run, RunningMean("in place"), coherence="fast")


def test_a_buffer_may_change_between_steps(run: Run) -> None:
    model = RunningMean("read")
    train(run, model, after=lambda step: model.mean.add_(1.0))


@pytest.mark.parametrize(("frozen", "said"), [(True, "weight was unfrozen"), (False, "weight was frozen")])
def test_a_layer_frozen_or_unfrozen_on_the_way_is_refused_by_name(run: Run, frozen: bool, said: str) -> None:
    model = torch.nn.Linear(4, 1)
    model.weight.requires_grad_(not frozen)

    def flip(step: Any) -> None:
        if step.number == 3:
            model.weight.requires_grad_(frozen)

    with pytest.raises(RacimoError, match=said) as raised:
        train(run, model, before=flip)
    assert raised.value.code == "steps-misused"


@pytest.mark.parametrize("place", ["before", "between", "after"])
@pytest.mark.parametrize("whose", ["given", "another"])
def test_an_update_beside_apply_is_refused_before_it_changes_anything(run: Run, place: str, whose: str) -> None:
    model = torch.nn.Linear(4, 1)
    optimizer, second = (torch.optim.AdamW(model.parameters(), lr=0.1) for _ in range(2))
    seen: list[torch.Tensor] = []

    def update(step: Any) -> None:
        seen.append(model.weight.detach().clone())
        (optimizer if whose == "given" else second).step()

    said = "step.apply.. does it" if whose == "given" else "does not know this optimizer"
    with pytest.raises(RacimoError, match=said) as raised:
        train(run, model, optimizer, **{place: update})
    assert raised.value.code == "steps-misused"
    assert torch.equal(model.weight, seen[-1])
    optimizer.step()  # after the loop the model is the user's own


def test_the_optimizer_of_another_model_is_the_users_own(run: Run) -> None:
    other = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    train(run, torch.nn.Linear(4, 1), after=lambda step: optimizer.step())


def test_several_optimizers_are_stepped_by_apply_and_resumed(run: Run, tmp_path: Path) -> None:
    def fresh() -> tuple[torch.nn.Module, tuple[torch.optim.Optimizer, ...]]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
        adam = torch.optim.AdamW(model[0].parameters(), lr=0.1)
        return model, (adam, torch.optim.SGD(model[1].parameters(), lr=0.1, momentum=0.9))

    spec = CheckpointSpec(to=str(tmp_path / "kept"))
    whole, both = fresh()
    untrained = hash_state(whole[1])  # type: ignore[index]
    train(run, whole, both)
    assert hash_state(whole[1]) != untrained  # type: ignore[index]
    for until in (2, 4):
        model, optimizers = fresh()
        train(run, model, optimizers, until=until, checkpoint=spec)
    assert hash_state(model, optimizers) == hash_state(whole, both)
    model, optimizers = fresh()
    with pytest.raises(RacimoError, match="the state of 2 optimizers, and there are 1"):
        train(run, model, optimizers[0], checkpoint=spec)


def test_no_optimizer_and_one_that_needs_a_closure_are_refused(run: Run) -> None:
    model = torch.nn.Linear(4, 1)
    for optimizer in ((), torch.optim.LBFGS(model.parameters())):
        with pytest.raises(RacimoError) as raised:
            next(iter(run.steps(model, optimizer, batches(), until=1)))
        assert raised.value.code == "steps-misused"
