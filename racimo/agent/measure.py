"""What this node's processes use, what it has left, and what listens here."""

import shutil
import time
from collections.abc import Iterable

from racimo.agent import processes
from racimo.agent.open_ports import open_ports
from racimo.agent.protocol import ProcessUsage, UsageReply
from racimo.agent.verdict import free_disk_bytes
from racimo.spec.home import Home


def measure_usage(
    home: Home, records: Iterable[processes.ProcessRecord], warnings: tuple[str, ...], began_s: float, *, ports: bool
) -> UsageReply:
    """Reads `/proc`: call it from a thread. `began_s`: when the agent began, on CLOCK_MONOTONIC."""
    living = list(records)
    usages = tuple(
        ProcessUsage(
            role=record.role,
            pid=record.pid,
            resident_bytes=processes.resident_bytes(record.pid),
            private_bytes=processes.private_bytes(record.pid) or 0,
            cpu_s=processes.cpu_s(record.pid),
        )
        for record in living
    )
    free_memory_bytes, total_memory_bytes = processes.memory_bytes()
    return UsageReply(
        processes=usages,
        warnings=warnings,
        free_memory_bytes=free_memory_bytes,
        total_memory_bytes=total_memory_bytes,
        free_disk_bytes=free_disk_bytes(home.node_dir),
        total_disk_bytes=shutil.disk_usage(home.node_dir).total,
        agent_age_s=time.monotonic() - began_s,
        ports=open_ports(living) if ports else (),
        wall_s=time.time(),
    )
