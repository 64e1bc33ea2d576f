"""What this machine is: its stable id, its devices, memory and versions."""

import importlib
import importlib.util
import os
import re
import secrets
import socket
from pathlib import Path

from racimo.act.versions import own_versions
from racimo.agent.processes import memory_bytes
from racimo.agent.whole_file import write_whole
from racimo.spec.home import Home
from racimo.state.nouns import Device, Node

NVIDIA_PROC_DIR = Path("/proc/driver/nvidia/gpus")


def discover_node(home: Home, slots: int | None, price_per_device_hour: float) -> Node:
    """The node as it is now. `slots`: CPU slots of a machine without accelerators, its usable cores if None;
    with 0 nothing at all is offered."""
    host = socket.gethostname()
    return Node(
        id=_node_id(home, host),
        host=host,
        devices=() if slots == 0 else _nvidia_devices() or _cpu_slots(slots),
        price_per_device_hour=price_per_device_hour,
        memory_bytes=memory_bytes()[1],
        versions=own_versions(),
    )


def _node_id(home: Home, host: str) -> str:
    """Drawn once per home, so that a machine whose host name changes stays the same node."""
    path = home.node_dir / "id"
    try:
        return path.read_text().strip()
    except FileNotFoundError:
        label = re.sub(r"[^a-z0-9-]+", "-", host.lower()).strip("-")[:24] or "node"
        drawn = f"{label}-{secrets.token_hex(2)}"
        write_whole(path, drawn.encode())
        return drawn


def _cpu_slots(slots: int | None) -> tuple[Device, ...]:
    return tuple(Device(index) for index in range(len(os.sched_getaffinity(0)) if slots is None else slots))


def _nvidia_devices() -> tuple[Device, ...]:
    """NVIDIA devices in the driver's order (that of CUDA_DEVICE_ORDER=PCI_BUS_ID), or none."""
    names = _names_from_nvml()
    if not names and NVIDIA_PROC_DIR.is_dir():
        for folder in sorted(NVIDIA_PROC_DIR.iterdir()):
            match = re.search(r"^Model:\s*(.+)$", (folder / "information").read_text(), re.MULTILINE)
            names.append(match[1] if match else "NVIDIA")
    visible = _visible_indices(len(names))
    return tuple(Device(index, "cuda", name) for index, name in enumerate(names) if index in visible)


def _visible_indices(count: int) -> set[int]:
    """The devices that CUDA_VISIBLE_DEVICES leaves to this cluster, where it is a list of numbers."""
    words = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if words == [""] or not all(word.strip().isdigit() for word in words):
        return set(range(count))
    return {int(word) for word in words}


def _names_from_nvml() -> list[str]:
    if importlib.util.find_spec("pynvml") is None:
        return []
    pynvml = importlib.import_module("pynvml")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []  # the library without a driver: no device here
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        return [str(pynvml.nvmlDeviceGetName(handle)) for handle in handles]
    finally:
        pynvml.nvmlShutdown()
