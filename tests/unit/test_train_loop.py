"""`run.steps` outside a cluster: the same code is a run of one worker, and the same things are refused."""

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from racimo.agent.protocol import WorkerContext
from racimo.spec.errors import RacimoError
from racimo.spec.run import CheckpointSpec
from racimo.worker.train.alone import LOG_EVERY_S, TERMINAL_EVERY_S, ProgressLine
from racimo.worker.train.batches import Batches
from racimo.worker.train.buffers import Store
from racimo.worker.train.run import Run
from racimo.worker.train.telemetry import Telemetry


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    monkeypatch.setenv("RACIMO_OUTPUT_DIR", str(tmp_path))
    run = Run(None)
    yield run
    run.close()


def data(size: int = 32) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(4, generator=generator), torch.tensor(float(i))) for i in range(size)]


def parts(
    model: torch.nn.Module | None = None, **kwargs: Any
) -> tuple[torch.nn.Module, torch.optim.Optimizer, Batches]:
    torch.manual_seed(0)
    model = model or torch.nn.Linear(4, 1)
    options = {"global_batch_size": 16, "micro_shards": 4} | kwargs
    return model, torch.optim.SGD(model.parameters(), lr=0.01), Batches(data(), **options)


def loss_of(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    return (model(batch.x).squeeze(-1) - batch.y).square().mean()


def test_the_gradient_is_that_of_the_whole_batch(run: Run) -> None:
    model, optimizer, batches = parts()
    twin = torch.nn.Linear(4, 1)
    twin.load_state_dict(model.state_dict())
    for step in run.steps(model, optimizer, batches, until=1):
        for batch in step:
            step.backward(loss_of(model, batch))
        step.apply()
    samples = [data()[i] for i in batches.indices(0)]
    inputs, targets = torch.stack([x for x, _ in samples]), torch.stack([y for _, y in samples])
    loss = (twin(inputs).squeeze(-1) - targets).square().mean()
    loss.backward()
    torch.optim.SGD(twin.parameters(), lr=0.01).step()
    assert step.loss == pytest.approx(loss.item(), rel=1e-6)
    assert torch.allclose(model.weight, twin.weight, rtol=1e-5)


def test_weights_make_the_mean_over_tokens_not_over_micro_shards(run: Run) -> None:
    model, optimizer, batches = parts()
    weights = iter([1.0, 2.0, 3.0, 10.0])
    seen = []
    for step in run.steps(model, optimizer, batches, until=1):
        for batch in step:
            loss = loss_of(model, batch)
            weight = next(weights)
            seen.append((weight, loss.item()))
            step.backward(loss, weight=weight)
        expected = sum(w * value for w, value in seen) / 16
        assert step.loss == pytest.approx(expected)
        step.apply()


def test_steps_count_from_one_and_epochs_from_zero(run: Run) -> None:
    model, optimizer, batches = parts()
    seen = []
    for step in run.steps(model, optimizer, batches, until=4):
        for batch in step:
            step.backward(loss_of(model, batch))
        step.apply()
        seen.append((step.number, step.epoch))
    assert seen == [(1, 0), (2, 0), (3, 1), (4, 1)]


def test_a_parameter_that_no_micro_shard_used_has_no_gradient(run: Run) -> None:
    model = torch.nn.ModuleDict({"used": torch.nn.Linear(4, 1), "unused": torch.nn.Linear(4, 1)})
    _, optimizer, batches = parts(model)
    for step in run.steps(model, optimizer, batches, until=1):
        for batch in step:
            step.backward(loss_of(model["used"], batch))
        assert model["unused"].weight.grad is None
        assert model["used"].weight.grad is not None
        step.apply()


def test_random_numbers_of_the_user_go_on_as_before(run: Run) -> None:
    model, optimizer, batches = parts()
    torch.manual_seed(5)
    for step in run.steps(model, optimizer, batches, until=1):
        for batch in step:
            step.backward(loss_of(model, batch))
        step.apply()
    after = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(after, torch.rand(3))


def test_a_script_resumes_outside_a_cluster_too(run: Run, tmp_path: Path) -> None:
    spec = CheckpointSpec(to=str(tmp_path / "kept"), every="2 steps")
    weights = []
    for until in (3, 5):
        model, optimizer, batches = parts()
        for step in run.steps(model, optimizer, batches, until=until, checkpoint=spec):
            for batch in step:
                step.backward(loss_of(model, batch))
            step.apply()
        weights.append(model.weight.detach().clone())
    model, optimizer, batches = parts()
    numbers = []
    for step in run.steps(model, optimizer, batches, until=5):
        for batch in step:
            step.backward(loss_of(model, batch))
        step.apply()
        numbers.append(step.number)
    assert numbers == [1, 2, 3, 4, 5]
    assert torch.equal(weights[1], model.weight)


def refused(run: Run, code: str, model: torch.nn.Module | None = None, **kwargs: Any) -> str:
    model, optimizer, batches = parts(model)
    with pytest.raises(RacimoError) as raised:
        list(run.steps(model, optimizer, batches, until=1, **kwargs))
    assert raised.value.code == code
    return raised.value.message


class DistributedDataParallel(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.module = torch.nn.Linear(4, 1)


def test_what_cannot_be_kept_exact_is_refused_before_the_first_step(run: Run) -> None:
    batch_norm = torch.nn.Sequential(torch.nn.Linear(4, 1), torch.nn.BatchNorm1d(1))
    assert "running statistics" in refused(run, "not-exact", batch_norm)
    assert "SyncBatchNorm" in refused(run, "not-exact", torch.nn.SyncBatchNorm(1))
    assert "DistributedDataParallel" in refused(run, "own-collectives", DistributedDataParallel())
    assert "state_dict" in refused(run, "state-not-stateful", state={"epoch": 3})
    assert "coherence" in refused(run, "steps-misused", coherence="loose")


def test_frozen_batch_norm_is_allowed(run: Run) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 1), torch.nn.BatchNorm1d(1).eval())
    _, optimizer, batches = parts(model)
    next(iter(run.steps(model, optimizer, batches, until=1))).number  # noqa: B018 - reaching it is the point


def test_an_optimizer_of_another_model_is_refused(run: Run) -> None:
    model, _, batches = parts()
    other = torch.optim.SGD(torch.nn.Linear(4, 1).parameters(), lr=0.1)
    with pytest.raises(RacimoError, match="2 parameters that are not the model's"):
        list(run.steps(model, other, batches, until=1))


def test_a_backward_pass_of_the_users_own_inside_the_loop_is_refused(run: Run) -> None:
    """Its gradient was dropped without a word."""
    model, optimizer, batches = parts()
    with pytest.raises(RacimoError, match="a backward pass of your own") as caught:
        for step in run.steps(model, optimizer, batches, until=1):
            for batch in step:
                (0.1 * loss_of(model, batch)).backward()
                step.backward(loss_of(model, batch))
    assert caught.value.code == "steps-misused"


def test_what_the_user_adds_to_the_whole_gradient_counts(run: Run) -> None:
    model, optimizer, batches = parts()
    for step in run.steps(model, optimizer, batches, until=1):
        for batch in step:
            step.backward(loss_of(model, batch))
        before = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        (0.1 * sum((parameter**2).sum() for parameter in model.parameters())).backward()
        after = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        assert all(not torch.equal(one, other) for one, other in zip(before, after, strict=True))
        step.apply()


def test_a_sparse_gradient_is_refused(run: Run) -> None:
    model = torch.nn.Embedding(8, 1, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(RacimoError, match="sparse") as raised:
        for step in run.steps(model, optimizer, Batches([0, 1], global_batch_size=2), until=1):
            for batch in step:
                step.backward(model(batch.data).sum())
    assert raised.value.code == "not-exact"


def apply_early(step: Any, model: torch.nn.Module) -> None:
    step.apply()


def forget_backward(step: Any, model: torch.nn.Module) -> None:
    for _ in step:
        pass


def backward_twice(step: Any, model: torch.nn.Module) -> None:
    for batch in step:
        step.backward(loss_of(model, batch))
        step.backward(loss_of(model, batch))


def backward_outside(step: Any, model: torch.nn.Module) -> None:
    step.backward(model(torch.ones(4)).sum())


def forget_apply(step: Any, model: torch.nn.Module) -> None:
    for batch in step:
        step.backward(loss_of(model, batch))


def loop_twice(step: Any, model: torch.nn.Module) -> None:
    forget_apply(step, model)
    forget_apply(step, model)


def ask_too_early(step: Any, model: torch.nn.Module) -> None:
    float(step.loss)


def loss_of_many(step: Any, model: torch.nn.Module) -> None:
    for batch in step:
        step.backward(model(batch.x))


def negative_weight(step: Any, model: torch.nn.Module) -> None:
    for batch in step:
        step.backward(loss_of(model, batch), weight=-1.0)


@pytest.mark.parametrize(
    "misuse",
    [
        apply_early,
        forget_backward,
        backward_twice,
        backward_outside,
        forget_apply,
        loop_twice,
        ask_too_early,
        loss_of_many,
        negative_weight,
    ],
)
def test_misuse_is_an_error_at_once(run: Run, misuse: Any) -> None:
    model, optimizer, batches = parts()
    with pytest.raises(RacimoError) as raised:
        for step in run.steps(model, optimizer, batches, until=2):
            misuse(step, model)
    assert raised.value.code == "steps-misused"


def test_two_nested_loops_are_refused(run: Run) -> None:
    model, optimizer, batches = parts()
    for _ in run.steps(model, optimizer, batches, until=1):
        with pytest.raises(RacimoError, match="inside another loop"):
            run.steps(model, optimizer, batches, until=1)
        break


def test_staging_through_host_memory_as_for_a_gpu_gives_the_same_bits(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = []
    for staged in (False, True):
        original = Store.__init__

        def staging(store: Store, *args: Any, original: Any = original, staged: bool = staged) -> None:
            original(store, *args)
            store._staged = staged

        with monkeypatch.context() as patch:
            patch.setattr(Store, "__init__", staging)
            model, optimizer, batches = parts(num_workers=0)
            for step in run.steps(model, optimizer, batches, until=5):
                for batch in step:
                    step.backward(loss_of(model, batch))
                step.apply()
        weights.append(model.weight.detach())
    assert torch.equal(*weights)


def test_alone_the_last_step_is_told_however_short_the_run(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    model, optimizer, batches = parts()
    for step in run.steps(model, optimizer, batches, until=3):
        for batch in step:
            step.backward(loss_of(model, batch))
        step.apply()
    assert capsys.readouterr().err == f"racimo: step 3/3, loss {step.loss:.4g}\n"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("stream", "every_s"), [(Terminal(), TERMINAL_EVERY_S), (io.StringIO(), LOG_EVERY_S)])
def test_alone_progress_is_told_now_and_then_with_the_time_left(stream: io.StringIO, every_s: float) -> None:
    line = ProgressLine(1000, stream, now_s=0.0)
    for step in range(1, 51):
        line.committed(step, 2.0, None if step == 1 else 0.5, now_s=step * 0.5)
    said = stream.getvalue().splitlines()
    assert len(said) == 25 // every_s
    assert said[0].startswith(f"racimo: step {round(2 * every_s)}/1000, loss 2, 8m ") and said[0].endswith("s left")


def test_a_torn_line_of_an_earlier_attempt_does_not_stop_the_next(run: Run, tmp_path: Path) -> None:
    for attempt, lines in (("1", b'{"step": 7, "contributions": {"0": [1]}}\n{"step": 8, "contributions": {"0": [1]}'),
                           ("2", b'\0\0\xff\n[3]\n{"loss": 1}\n')):  # fmt: skip
        (tmp_path / attempt / "0").mkdir(parents=True)
        (tmp_path / attempt / "0" / "steps.jsonl").write_bytes(lines)
    telemetry = Telemetry("r/2/0", run._link, str(tmp_path / "2" / "0"), until=20)
    assert telemetry.committed_before() == 7
    telemetry.close()


class Unpicklable:
    def state_dict(self) -> dict[str, Any]:
        return {"made by": lambda: None}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


def test_state_that_cannot_be_written_is_the_error_at_the_end(run: Run, tmp_path: Path) -> None:
    """Not only `OSError`: file systems at URLs and users' state raise what they like, in a thread."""
    spec = CheckpointSpec(to=str(tmp_path / "kept"), every="1 steps")
    model, optimizer, batches = parts()
    with pytest.raises(RacimoError, match=r"could not be written.*lambda") as raised:
        for step in run.steps(model, optimizer, batches, until=3, checkpoint=spec, state={"odd": Unpicklable()}):
            for batch in step:
                step.backward(loss_of(model, batch))
            step.apply()
    assert (raised.value.code, step.number) == ("checkpoint-failed", 3)


def test_a_relative_place_for_checkpoints_is_in_the_output_folder(run: Run, tmp_path: Path) -> None:
    """Not in the working directory, which in a cluster is one attempt's own: the next would not find it."""
    assert run._place(CheckpointSpec(to="kept/here"), "").root == str(tmp_path / "kept" / "here")
    assert run._place(CheckpointSpec(to="file://kept"), "").root == str(tmp_path / "kept")
    assert run._place(CheckpointSpec(to="/kept"), "").root == "/kept"
    assert run._place(CheckpointSpec(to="memory://kept"), "").root == "memory://kept"


def test_checkpoints_that_end_with_their_worker_are_refused_in_a_cluster(run: Run, tmp_path: Path) -> None:
    context = WorkerContext(
        worker="r/1/0", run="r", attempt=1, index=0, rank=0, world_size=1, least=1, most=1, seed=0, threads=1,
        devices=(0,), directory=str(tmp_path), output_dir=str(tmp_path), agent_socket="", node="n", host="h",
        checkpoint=CheckpointSpec(),
    )  # fmt: skip
    run._context = context
    assert run._place(CheckpointSpec(to="kept"), "").root == str(tmp_path / "kept")
    assert run._place(CheckpointSpec(to="/kept"), "").root == f"/kept/{run.id}"
    with pytest.raises(RacimoError, match="end with the process that wrote them"):
        run._place(CheckpointSpec(to="memory://kept"), "")
