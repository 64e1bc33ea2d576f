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

from racimo.worker.train.messages import StateOffer

StateTree = dict[str, Any]
_ALIGN_BYTES = 64


class Stateful(Protocol):
    """A schedule, an average of weights, a sampler: whatever has to survive with the model."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


class Trained(msgspec.Struct, frozen=True):
    """The objects that hold the state of a run."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    extra: Mapping[str, Stateful]

    def capture(self) -> StateTree:
        """References into the live state, not copies."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "state": {name: stateful.state_dict() for name, stateful in self.extra.items()},
        }

    def load(self, tree: StateTree) -> None:
        """Puts a captured state into the objects, which may keep its tensors: the tree is used up."""
        self.model.load_state_dict(tree["model"])
        self.optimizer.load_state_dict(tree["optimizer"])
        for name, stateful in self.extra.items():
            stateful.load_state_dict(tree["state"][name])


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


class _Pickler(pickle.Pickler):
    """Leaves the contents of tensors out: only their place in the memory that goes along."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[torch.Tensor] = []
        self.size_bytes = 0

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return None
        offset = self.size_bytes
        self.tensors.append(value.detach())
        self.size_bytes += -(-value.numel() * value.element_size() // _ALIGN_BYTES) * _ALIGN_BYTES
        return offset, value.dtype, tuple(value.shape)


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, memory: mmap.mmap, base: int) -> None:
        super().__init__(file)
        self._memory = memory
        self._base = base

    def persistent_load(self, pid: Any) -> torch.Tensor:
        offset, dtype, shape = pid
        count = int(numpy.prod(shape, dtype=numpy.int64))
        if count == 0:
            return torch.empty(shape, dtype=dtype)
        flat = torch.frombuffer(self._memory, dtype=dtype, count=count, offset=self._base + offset)
        return flat.clone().view(shape)


def pack(tree: StateTree, step: int) -> tuple[StateOffer, int]:
    """The state in a new memfd: a small pickle of its structure, then the tensors' bytes."""
    skeleton = io.BytesIO()
    pickler = _Pickler(skeleton)
    pickler.dump(tree)
    base = -(-skeleton.tell() // _ALIGN_BYTES) * _ALIGN_BYTES
    size = max(base + pickler.size_bytes, mmap.PAGESIZE)
    fd = os.memfd_create("racimo-state", os.MFD_CLOEXEC)
    os.ftruncate(fd, size)
    with mmap.mmap(fd, size) as memory:
        memory[: skeleton.tell()] = skeleton.getvalue()
        _fill(memory, base, pickler.tensors)
    return StateOffer(step=step, skeleton_bytes=skeleton.tell(), size_bytes=size), fd


def _fill(memory: mmap.mmap, base: int, tensors: list[torch.Tensor]) -> None:
    offset = base
    for tensor in tensors:
        if tensor.numel():
            target = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=offset)
            target.copy_(tensor.reshape(-1))
            del target
        offset += -(-tensor.numel() * tensor.element_size() // _ALIGN_BYTES) * _ALIGN_BYTES


def unpack(offer: StateOffer, fd: int) -> StateTree:
    """The state from a peer's memfd, in private memory. Closes `fd`.

    Only for peers that the kernel says are of the same user: the structure is a pickle."""
    try:
        memory = mmap.mmap(fd, offer.size_bytes)
    finally:
        os.close(fd)
    base = -(-offer.skeleton_bytes // _ALIGN_BYTES) * _ALIGN_BYTES
    skeleton = io.BytesIO(memory[: offer.skeleton_bytes])
    return cast(StateTree, _Unpickler(skeleton, memory, base).load())


def hash_state(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    state: Mapping[str, Stateful] | None = None,
) -> str:
    """SHA-256 (hex) of the weights, the optimizer's state and whatever else is given: equal if every bit is."""
    digest = hashlib.sha256()
    _feed(digest, model.state_dict())
    _feed(digest, optimizer.state_dict() if optimizer is not None else None)
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


def checksum(parameters: Sequence[torch.Tensor]) -> int:
    """A cheap sum over the bits of all parameters, to tell whether workers still hold the same model."""
    total = 0
    for position, parameter in enumerate(parameters):
        bits = parameter.detach().contiguous().reshape(-1)
        whole = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[bits.element_size()]
        total += (2 * position + 1) * int(bits.view(whole).sum(dtype=torch.int64))
    return total & (2**63 - 1)
