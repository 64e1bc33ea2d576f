"""The whole training state as one tree of plain values and tensors: taken, moved between processes, loaded, hashed."""

import hashlib
import io
import mmap
import os
import pickle
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, cast

import msgspec
import numpy
import torch

from racimo.spec.errors import RacimoError
from racimo.worker.train.messages import Outcome, StateOffer

StateTree = dict[str, Any]
STRUCTURE = "racimo.structure"
"""Among a checkpoint's tensors, which go by their path (`model.0.weight`), one pickle says how they hang together."""
_ALIGN_BYTES = 64


class Stateful(Protocol):
    """A schedule, an average of weights, a sampler: whatever has to survive with the model."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


class Trained(msgspec.Struct, frozen=True):
    """The objects that hold the state of a run."""

    model: torch.nn.Module
    optimizers: tuple[torch.optim.Optimizer, ...]
    extra: Mapping[str, Stateful]

    def capture(self) -> StateTree:
        """References into the live state, not copies."""
        return {
            "model": self.model.state_dict(),
            "optimizer": _optimizer_state(self.optimizers),
            "state": {name: stateful.state_dict() for name, stateful in self.extra.items()},
        }

    def load(self, tree: StateTree) -> None:
        """Puts a captured state into the objects, which may keep its tensors: the tree is used up."""
        states = tree["optimizer"] if isinstance(tree["optimizer"], list) else [tree["optimizer"]]
        if len(states) != len(self.optimizers):
            message = f"the checkpoint has the state of {len(states)} optimizers, and there are {len(self.optimizers)}"
            raise RacimoError("checkpoint-mismatch", message, "train with the same optimizers as the checkpoint")
        self.model.load_state_dict(tree["model"])
        for optimizer, state in zip(self.optimizers, states, strict=True):
            optimizer.load_state_dict(state)
        for name, stateful in self.extra.items():
            stateful.load_state_dict(tree["state"][name])


def _optimizer_state(optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Any] | list[dict[str, Any]]:
    """Of one as torch gives it, of several a list."""
    states = [optimizer.state_dict() for optimizer in optimizers]
    return states[0] if len(states) == 1 else states


def copy_to_host(value: Any) -> Any:
    """The same tree with every tensor copied to the CPU's memory."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        return {key: copy_to_host(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        copied = [copy_to_host(item) for item in value]
        return copied if isinstance(value, list) or type(value) is not tuple else tuple(copied)
    return value


class _Names:
    """A name for every tensor of a tree: its path, such as `model.0.weight`, which reads well in a checkpoint.

    Paths can be equal (`{"a.b": x, "a": {"b": y}}`, or the keys 1 and "1"): then a number is appended."""

    def __init__(self, tree: "StateTree") -> None:
        self._taken = {STRUCTURE}
        self._of: dict[int, str] = {}
        self._name_all(tree, "")

    def of(self, tensor: torch.Tensor) -> str:
        # Tensors inside objects have no path of their own, and may be made anew each time they are asked for.
        return self._of.get(id(tensor)) or self._unused("other")

    def _unused(self, path: str) -> str:
        name, number = path, 1
        while name in self._taken:
            number += 1
            name = f"{path}~{number}"
        self._taken.add(name)
        return name

    def _name_all(self, value: Any, path: str) -> None:
        if isinstance(value, torch.Tensor):
            if id(value) not in self._of:
                self._of[id(value)] = self._unused(path)
        elif isinstance(value, Mapping):
            for key, item in value.items():
                self._name_all(item, f"{path}.{key}" if path else str(key))
        elif isinstance(value, list | tuple):
            for position, item in enumerate(value):
                self._name_all(item, f"{path}.{position}")


class _Pickler(pickle.Pickler):
    """Leaves tensors out; only their names stay."""

    def __init__(self, file: io.BytesIO, names: _Names) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._names = names
        self.tensors: dict[str, torch.Tensor] = {}

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return None
        name = self._names.of(value)
        self.tensors[name] = value.detach()
        return name


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def persistent_load(self, pid: Any) -> torch.Tensor:
        return self._tensors[pid]


def split(tree: StateTree) -> tuple[bytes, dict[str, torch.Tensor]]:
    """The structure as a pickle without tensors, and the tensors by their path, such as `model.0.weight`."""
    file = io.BytesIO()
    pickler = _Pickler(file, _Names(tree))
    pickler.dump(tree)
    return file.getvalue(), pickler.tensors


def join(structure: bytes, tensors: Mapping[str, torch.Tensor]) -> StateTree:
    """Undoes `split`. Only for content of the same user: the structure is a pickle."""
    return cast(StateTree, _Unpickler(io.BytesIO(structure), tensors).load())


def pack(tree: StateTree, step: int, last: Outcome | None = None) -> tuple[StateOffer, int]:
    """The state in a new memfd: a small pickle of its structure, then the tensors' bytes."""
    structure, tensors = split(tree)
    table = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
    head = pickle.dumps((structure, table), protocol=pickle.HIGHEST_PROTOCOL)
    size = max(_aligned(len(head)) + sum(_aligned(t.numel() * t.element_size()) for t in tensors.values()), 1)
    fd = os.memfd_create("racimo-state", os.MFD_CLOEXEC)
    os.ftruncate(fd, size)
    with mmap.mmap(fd, size) as memory:
        memory[: len(head)] = head
        offset = _aligned(len(head))
        for tensor in tensors.values():
            if tensor.numel():
                target = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=offset)
                target.copy_(tensor.reshape(-1))
                del target  # else the mapping could not be closed
            offset += _aligned(tensor.numel() * tensor.element_size())
    return StateOffer(step=step, head_bytes=len(head), size_bytes=size, last=last), fd


def unpack(offer: StateOffer, fd: int) -> StateTree:
    """The state from a peer's memfd, in private memory. Closes `fd`.

    Only for peers that are known (of the same user, or with the key of the attempt): the structure is a pickle."""
    try:
        memory = mmap.mmap(fd, offer.size_bytes)
    finally:
        os.close(fd)
    structure, table = pickle.loads(memory[: offer.head_bytes])  # noqa: S301 - see above
    tensors = {}
    offset = _aligned(offer.head_bytes)
    for name, dtype, shape in table:
        tensors[name] = torch.empty(shape, dtype=dtype)
        count = tensors[name].numel()
        if count:
            source = torch.frombuffer(memory, dtype=dtype, count=count, offset=offset)
            tensors[name].copy_(source.view(shape))
        offset += _aligned(count * dtype.itemsize)
    return join(structure, tensors)


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGN_BYTES) * _ALIGN_BYTES


def hash_state(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    state: Mapping[str, Stateful] | None = None,
) -> str:
    """SHA-256 (hex) of the weights, the optimizer's (or several optimizers') state and whatever else is given: equal if
    every bit is."""
    optimizers = (optimizer,) if isinstance(optimizer, torch.optim.Optimizer) else tuple(optimizer or ())
    digest = hashlib.sha256()
    _feed(digest, model.state_dict())
    _feed(digest, _optimizer_state(optimizers) if optimizers else None)
    _feed(digest, {name: stateful.state_dict() for name, stateful in (state or {}).items()})
    return digest.hexdigest()


def _feed(digest: "hashlib._Hash", value: Any) -> None:
    if isinstance(value, numpy.ndarray | numpy.generic):
        value = torch.from_numpy(numpy.atleast_1d(value).copy())
    if isinstance(value, torch.Tensor):
        content = value.detach().cpu().contiguous()
        digest.update(f"tensor {content.dtype} {tuple(content.shape)}\n".encode())
        if content.numel():
            digest.update(content.reshape(-1).view(torch.uint8).numpy().data)
    elif isinstance(value, Mapping):
        digest.update(f"map {len(value)}\n".encode())
        for key in sorted(value, key=lambda key: (type(key).__name__, key)):
            digest.update(f"key {key!r}\n".encode())
            _feed(digest, value[key])
    elif isinstance(value, list | tuple):
        digest.update(f"list {len(value)}\n".encode())
        for item in value:
            _feed(digest, item)
    elif value is None or isinstance(value, bool | int | float | complex | str | bytes):
        digest.update(f"{type(value).__name__} {value!r}\n".encode())
    elif callable(value):
        digest.update(f"callable {getattr(value, '__qualname__', type(value).__qualname__)}\n".encode())
    else:
        digest.update(f"object {type(value).__qualname__}\n".encode())
        _feed(digest, vars(value) if hasattr(value, "__dict__") else repr(value))


def checksum(tensors: Sequence[torch.Tensor]) -> int:
    """A cheap sum over the bits of all tensors, to tell whether workers still hold the same model."""
    total = 0
    for position, tensor in enumerate(tensors):
        bits = tensor.detach().contiguous().reshape(-1)
        whole = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}[bits.element_size()]
        total += (2 * position + 1) * int(bits.view(whole).sum(dtype=torch.int64))
    return total & (2**63 - 1)
