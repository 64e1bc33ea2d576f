"""Checkpoints are whole or not there."""

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed.checkpoint as dcp

from racimo.spec.errors import RacimoError
from racimo.worker.train import checkpoint
from racimo.worker.train.checkpoint import Shelf, Torn, load, resume
from racimo.worker.train.fence import Fenced
from racimo.worker.train.messages import Identity
from racimo.worker.train.state import Trained, hash_state, pack, unpack

IDENTITY = Identity(
    micro_shards=8, seed=0, global_batch_size=32, dataset_size=100, parameters="2 (0)", coherence="exact"
)


def trained() -> Trained:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)
    return Trained(model, (optimizer,), {"schedule": schedule})


def train(subject: Trained, num_steps: int) -> None:
    for _ in range(num_steps):
        subject.model(torch.randn(3, 4)).square().sum().backward()
        subject.optimizers[0].step()
        subject.extra["schedule"].step()  # type: ignore[attr-defined]


def digest(subject: Trained) -> str:
    return hash_state(subject.model, subject.optimizers, subject.extra)


@pytest.fixture
def said() -> list[str]:
    return []


def saved(root: str, *steps: int) -> tuple[Shelf, Trained]:
    shelf, subject = Shelf(root), trained()
    for step in steps:
        train(subject, 1)
        shelf.save(step, "run-1", IDENTITY, subject.capture())
    return shelf, subject


@pytest.mark.parametrize("where", ["folder", "file://", "memory://"])
def test_what_was_saved_comes_back_bit_for_bit(tmp_path: Path, said: list[str], where: str) -> None:
    """The optimizer's state exists only after its first step, so a fresh one has to take it on."""
    root = {"folder": str(tmp_path), "file://": f"file://{tmp_path}", "memory://": f"memory://{tmp_path.name}"}[where]
    shelf, subject = saved(root, 10, 20)
    found = shelf.newest(said.append)
    assert found is not None
    manifest, tree = found
    assert (manifest.step, manifest.run, manifest.identity) == (20, "run-1", IDENTITY)
    other = trained()
    other.load(tree)
    assert digest(other) == digest(subject)
    assert said == []


def test_torch_itself_reads_a_checkpoint(tmp_path: Path) -> None:
    _, subject = saved(str(tmp_path), 10)
    weights = {"model.0.weight": torch.zeros(4, 4)}
    dcp.load(weights, storage_reader=dcp.FileSystemReader(tmp_path / "step-10"), no_dist=True)
    assert torch.equal(weights["model.0.weight"], subject.model.state_dict()["0.weight"])


def shorten(folder: Path) -> None:
    file = next(folder.glob("*.distcp"))
    os.truncate(file, file.stat().st_size // 2)


def flip_a_bit(folder: Path) -> None:
    file = next(folder.glob("*.distcp"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def lose_manifest(folder: Path) -> None:
    (folder / checkpoint.MANIFEST).unlink()


def cut_manifest(folder: Path) -> None:
    (folder / checkpoint.MANIFEST).write_text('{"step": 2')


def lose_a_file(folder: Path) -> None:
    (folder / ".metadata").unlink()


@pytest.mark.parametrize("damage", [shorten, flip_a_bit, lose_manifest, cut_manifest, lose_a_file])
def test_a_torn_checkpoint_is_said_and_never_chosen(tmp_path: Path, said: list[str], damage: Any) -> None:
    shelf, _ = saved(str(tmp_path), 10, 20)
    damage(tmp_path / "step-20")
    found = shelf.newest(said.append)
    assert found is not None and found[0].step == 10
    assert len(said) == 1 and "step-20 is torn" in said[0] and "checkpoint-torn" in said[0]
    with pytest.raises(RacimoError) as refused:
        resume(str(tmp_path / "step-20"), said.append)
    assert refused.value.code == "checkpoint-torn"


def test_an_interrupted_write_is_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shelf, _ = saved(str(tmp_path), 10)

    def power_cut(_: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "_sync_folder", power_cut)
    with pytest.raises(OSError, match="No space"):
        shelf.save(20, "run-1", IDENTITY, trained().capture())
    assert [path.name for path in tmp_path.iterdir()] == ["step-10"]
    assert shelf.steps() == [10]


def test_only_the_newest_are_kept_and_remains_are_swept(tmp_path: Path) -> None:
    shelf, _ = saved(str(tmp_path), 10, 20, 30)
    (tmp_path / "step-40.tmp-abc").mkdir()
    shelf.prune(2)
    shelf.sweep()
    assert shelf.steps() == [30, 20]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-20", "step-30"]


def test_saving_a_step_again_replaces_a_torn_one(tmp_path: Path) -> None:
    shelf, subject = saved(str(tmp_path), 10)
    shorten(tmp_path / "step-10")
    with pytest.raises(Torn):
        load(shelf.path(10))
    shelf.save(10, "run-1", IDENTITY, subject.capture())
    assert load(shelf.path(10))[0].step == 10
    assert [path.name for path in tmp_path.iterdir()] == ["step-10"]


def test_resuming_from_where_nothing_is_names_the_place(tmp_path: Path, said: list[str]) -> None:
    with pytest.raises(RacimoError, match=str(tmp_path)):
        resume(str(tmp_path), said.append)


def test_state_goes_through_shared_memory_bit_for_bit() -> None:
    subject, other = trained(), trained()
    train(subject, 3)
    other.load(unpack(*pack(subject.capture(), 3)))
    assert digest(other) == digest(subject)
    before = digest(subject)
    train(other, 1)
    assert digest(subject) == before, "they share memory"


def test_tied_weights_are_moved_once_and_stay_tied() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    model[1].weight = model[0].weight
    offer, fd = pack(Trained(model, (torch.optim.SGD(model.parameters(), lr=0.1),), {}).capture(), 0)
    tree = unpack(offer, fd)
    assert torch.equal(tree["model"]["0.weight"], tree["model"]["1.weight"])


def test_torch_does_not_advise_against_saving_without_a_process_group(tmp_path: Path) -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        shelf = Shelf(str(tmp_path))
        shelf.save(1, "run", IDENTITY, trained().capture())
        shelf.newest(print)
        warnings.warn("torch.distributed is odd", stacklevel=1)
    assert [str(warning.message) for warning in said] == ["torch.distributed is odd"]


class Weird:
    """A tensor inside an object has no path."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def test_no_two_tensors_of_a_tree_go_by_one_name(tmp_path: Path) -> None:
    values = [torch.tensor([float(number)]) for number in range(8)]
    tree: dict[Any, Any] = {
        "a.b": values[0],
        "a": {"b": values[1]},
        1: values[2],
        "1": values[3],
        "a.b~2": values[4],
        "racimo.structure": values[5],
        "other": values[6],
        "object": Weird(values[7]),
    }

    def flat(back: dict[Any, Any]) -> list[float]:
        spots = (back["a.b"], back["a"]["b"], back[1], back["1"], back["a.b~2"], back["racimo.structure"])
        return [float(value) for value in (*spots, back["other"], back["object"].tensor)]

    Shelf(str(tmp_path)).save(1, "run-1", IDENTITY, tree)
    assert flat(load(str(tmp_path / "step-1"))[1]) == list(range(8))
    assert flat(unpack(*pack(tree, 0))) == list(range(8))


def test_a_file_with_a_checkpoints_name_is_passed_over_and_kept(tmp_path: Path, said: list[str]) -> None:
    shelf, _ = saved(str(tmp_path), 10)
    for step in (5, 20):
        (tmp_path / f"step-{step}").write_text("mine")
    found = shelf.newest(said.append)
    assert found is not None and found[0].step == 10
    assert len(said) == 1 and "step-20" in said[0] and "is a file" in said[0]
    shelf.prune(1)
    with pytest.raises(FileExistsError):
        saved(str(tmp_path), 20)
    assert (tmp_path / "step-5").read_text() == (tmp_path / "step-20").read_text() == "mine"


@pytest.mark.parametrize("place", ["bogus://somewhere/x", "/dev/null", "/dev/null/x"])
def test_a_place_that_cannot_be_is_an_error_with_the_cause(place: str, said: list[str]) -> None:
    with pytest.raises(RacimoError, match=r"bogus|is a file") as raised:
        Shelf(place).reach()
    assert raised.value.code == "checkpoint-failed"
    with pytest.raises(RacimoError):
        resume(f"{place}/step-3", said.append)


def test_a_torn_checkpoint_at_a_url_can_be_pruned(tmp_path: Path) -> None:
    root = f"memory://{tmp_path.name}"
    shelf, _ = saved(root, 10, 20)
    fs, path = checkpoint.fsspec.core.url_to_fs(root)
    fs.rm(f"{path}/step-10/racimo.json")
    shelf.prune(1)
    assert shelf.steps() == [20]


PLACES = ["{}", "memory://{}"]


@pytest.fixture(params=PLACES)
def shared(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A place that workers on all machines see."""
    return str(request.param).format(tmp_path)


def save(shelf: Shelf, step: int, coherence: str = "exact") -> None:
    shelf.save(step, "run-1", msgspec.structs.replace(IDENTITY, coherence=coherence), trained().capture())


def chosen(root: str) -> tuple[int, int]:
    said: list[str] = []
    found = Shelf(root).newest(said.append)
    assert found is not None and not said, said
    return found[0].attempt, found[0].step


def test_workers_of_an_attempt_that_was_given_up_write_nothing_over_a_newer_ones(shared: str) -> None:
    """They live on where nobody hears them, and a URL is the same place for both."""
    stray, newer = Shelf(shared, 1), Shelf(shared, 2)
    save(stray, 10)
    newer.fence.claim()
    save(newer, 20)
    for step in (20, 30):
        with pytest.raises(Fenced, match="attempt 2"):
            save(stray, step)
    with pytest.raises(Fenced):
        stray.prune(1)
    assert (chosen(shared), newer.steps()) == ((2, 20), [20, 10])
    Shelf(shared, 1).fence.claim()
    save(newer, 30)
    assert chosen(shared) == (2, 30)


def test_a_newer_attempts_checkpoint_is_not_replaced_even_where_its_mark_is_lost(shared: str) -> None:
    save(Shelf(shared, 2), 20)
    with pytest.raises(Fenced):
        save(Shelf(shared, 1), 20)
    assert chosen(shared) == (2, 20)


def test_what_was_being_written_when_a_newer_attempt_began_gets_no_name(
    shared: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write: Callable[..., Any] = checkpoint._write

    def meanwhile(*args: Any) -> Any:
        written = write(*args)
        Shelf(shared, 2).fence.claim()
        return written

    monkeypatch.setattr(checkpoint, "_write", meanwhile)
    with pytest.raises(Fenced):
        save(Shelf(shared, 1), 10)
    assert Shelf(shared).steps() == []


def test_where_bits_depend_on_who_was_there_the_newest_attempt_comes_first(tmp_path: Path) -> None:
    """A stray wrote on its own machine's disk, where no mark reached it."""
    for coherence, expected in (("fast", (2, 20)), ("exact", (1, 30))):
        root = str(tmp_path / coherence)
        save(Shelf(root, 1), 10, coherence)
        save(Shelf(root, 2), 20, coherence)
        save(Shelf(root, 1), 30, coherence)
        assert chosen(root) == expected
        assert Shelf(root).newest_precedence(print)[1] == expected[1]
        Shelf(root, 2).prune(1)
        assert chosen(root) == expected


def test_the_first_attempt_leaves_no_mark(tmp_path: Path) -> None:
    Shelf(str(tmp_path / "new"), 1).fence.claim()
    assert not (tmp_path / "new").exists()
