"""Gradients as flat buffers in shared memory, where peers on the same machine read them without a copy between.

An *arena* is one memfd: a page of header, then equal *slots*, each large enough for all gradients. Slot 0 holds the
reduced gradient of the newest step, the others hold blocks. The file is sparse and slots are mapped when first used,
so only those in use cost memory.
"""

import errno
import mmap
import os
import threading
from collections.abc import Iterable, Sequence

import msgspec
import numpy
import torch

REDUCED_SLOT = 0
_ALIGN_BYTES = 64
_HEADER_BYTES = mmap.PAGESIZE


class Section(msgspec.Struct, frozen=True):
    """The parameters of one dtype, packed one after the other."""

    dtype: torch.dtype
    offset_bytes: int
    num_elements: int


class Layout:
    """Where each parameter's gradient lies within a slot; a section for every dtype."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self.shapes = [parameter.shape for parameter in parameters]
        self._spots: list[tuple[int, int, int]] = [(0, 0, 0)] * len(parameters)
        sections: list[Section] = []
        offset = 0
        for dtype in sorted({parameter.dtype for parameter in parameters}, key=str):
            align = _ALIGN_BYTES // dtype.itemsize
            count = 0
            for index, parameter in enumerate(parameters):
                if parameter.dtype == dtype:
                    self._spots[index] = (len(sections), count, parameter.numel())
                    count += -(-parameter.numel() // align) * align
            sections.append(Section(dtype, offset, count))
            offset += count * dtype.itemsize
        self.sections = tuple(sections)
        self.slot_bytes = max(-(-offset // mmap.PAGESIZE), 1) * mmap.PAGESIZE

    def views(self, flats: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """One view per parameter, in its shape, onto the flat tensors of a slot."""
        spots = zip(self._spots, self.shapes, strict=True)
        return [flats[section][start : start + size].view(shape) for (section, start, size), shape in spots]

    def new_flats(self, device: torch.device) -> list[torch.Tensor]:
        """Private memory of one slot's layout."""
        return [torch.zeros(section.num_elements, dtype=section.dtype, device=device) for section in self.sections]

    def bounds(self, section: Section, position: int, num_parts: int) -> tuple[int, int]:
        """The elements of a section in the `position`th part; cut at cache lines."""
        align = _ALIGN_BYTES // section.dtype.itemsize
        lines = section.num_elements // align
        return lines * position // num_parts * align, lines * (position + 1) // num_parts * align

    def part(self, flats: Sequence[torch.Tensor], position: int, num_parts: int) -> list[torch.Tensor]:
        """Of every section of a slot the elements in the `position`th part."""
        bounds = (self.bounds(section, position, num_parts) for section in self.sections)
        return [flat[low:high] for flat, (low, high) in zip(flats, bounds, strict=True)]


def raw(tensors: Iterable[torch.Tensor]) -> list[memoryview]:
    """The bytes of flat tensors, to be sent from or received into."""
    return [memoryview(t.view(torch.uint8).numpy()) for t in tensors if t.numel()]  # type: ignore[arg-type]


class Arena:
    """One worker's shared slots, its own or a peer's. Takes over the descriptor `fd`."""

    def __init__(self, layout: Layout, fd: int) -> None:
        self._layout = layout
        self.fd = fd
        self._slots: dict[int, list[torch.Tensor]] = {}
        self._mapping = threading.Lock()
        """The courier's thread maps slots while the main thread may close: the number of a closed descriptor is soon
        that of another arena, perhaps a peer's own, into which what still arrives must not be written."""
        self._closed = False
        self._header = numpy.frombuffer(mmap.mmap(fd, _HEADER_BYTES), dtype=numpy.int64)

    @classmethod
    def create(cls, layout: Layout, num_slots: int) -> "Arena":
        fd = os.memfd_create("racimo-gradients", os.MFD_CLOEXEC)
        os.ftruncate(fd, _HEADER_BYTES + num_slots * layout.slot_bytes)
        return cls(layout, fd)

    def flats(self, slot: int) -> list[torch.Tensor]:
        """The slot's flat tensors, one per section. Raises `OSError` once it is closed."""
        with self._mapping:
            if self._closed:
                raise OSError(errno.EBADF, "the arena is closed")
            if slot not in self._slots:
                size = self._layout.slot_bytes
                memory = mmap.mmap(self.fd, size, offset=_HEADER_BYTES + slot * size)
                self._slots[slot] = [
                    torch.frombuffer(memory, dtype=s.dtype, count=s.num_elements, offset=s.offset_bytes)
                    for s in self._layout.sections
                ]
            return self._slots[slot]

    def close(self) -> None:
        """Mapped slots go when the last tensor on them does."""
        with self._mapping:
            self._closed = True
            os.close(self.fd)
            self._slots = {}

    # Peers look at these words after reading, to know that what they read was not being changed meanwhile.

    @property
    def serving(self) -> int:
        """The generation for which the blocks lie still; 0 while they may change."""
        return int(self._header[0])

    @serving.setter
    def serving(self, generation: int) -> None:
        self._header[0] = generation

    @property
    def reduced_step(self) -> int:
        """The step (its number, from 1) whose gradient slot 0 holds; 0 while it is being written."""
        return int(self._header[1])

    @reduced_step.setter
    def reduced_step(self, step: int) -> None:
        self._header[1] = step


class Store:
    """This worker's gradients: where backward passes accumulate them, and the arena through which peers see them.

    On the CPU both are the same memory. Elsewhere blocks stay on the device until `publish` copies them out.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], num_slots: int) -> None:
        self.parameters = parameters
        self.device = parameters[0].device
        self._staged = self.device.type != "cpu"
        self.layout = Layout(parameters)
        self.arena = Arena.create(self.layout, num_slots)
        self.num_slots = num_slots
        self._work: dict[int, list[torch.Tensor]] = {}
        self._views: dict[int, list[torch.Tensor]] = {}
        self._gradients = self.layout.new_flats(self.device)
        self._gradient_views = self.layout.views(self._gradients)

    def work(self, slot: int) -> list[torch.Tensor]:
        """Flat tensors on the model's device in which a block is accumulated."""
        if not self._staged:
            return self.arena.flats(slot)
        if slot not in self._work:
            self._work[slot] = self.layout.new_flats(self.device)
        return self._work[slot]

    def views(self, slot: int) -> list[torch.Tensor]:
        """Per-parameter views onto `work(slot)`."""
        if slot not in self._views:
            self._views[slot] = self.layout.views(self.work(slot))
        return self._views[slot]

    def publish(self, slot: int) -> None:
        """Makes a block readable for peers."""
        if self._staged:
            for shared, local in zip(self.arena.flats(slot), self.work(slot), strict=True):
                shared.copy_(local)

    def hand_out(self, used: bytes) -> None:
        """Puts a copy of the reduced gradient into every `.grad`; None where no micro-shard used the parameter.

        A copy, because users clip in place and a peer that is one step behind still needs the original.
        """
        for mine, reduced in zip(self._gradients, self.arena.flats(REDUCED_SLOT), strict=True):
            mine.copy_(reduced)
        for index, (parameter, view) in enumerate(zip(self.parameters, self._gradient_views, strict=True)):
            parameter.grad = view if used[index >> 3] >> (index & 7) & 1 else None

    def drop_gradients(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def close(self) -> None:
        self.arena.close()
