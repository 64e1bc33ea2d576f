"""What the control process and its supervisor use, beside what the agent says of its own."""

import os
from pathlib import Path

from racimo.act.guardian import read_live
from racimo.agent.protocol import ProcessUsage

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def with_services(root: Path, processes: tuple[ProcessUsage, ...]) -> tuple[ProcessUsage, ...]:
    """`processes`, and supervisor and control process before them."""
    known = {process.pid for process in processes}
    found = []
    for role in ("supervisor", "control"):
        record = read_live(root, role)
        usage = process_usage(record.pid, role) if record is not None and record.pid not in known else None
        if usage is not None:
            found.append(usage)
    return (*found, *processes)


def process_usage(pid: int, role: str) -> ProcessUsage | None:
    """From `/proc`; None if the process is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
        sizes = {
            words[0]: int(words[1]) * 1024
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
            if len(words := line.split()) == 3
        }
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    private_bytes = sizes.get("Private_Clean:", 0) + sizes.get("Private_Dirty:", 0)
    cpu_s = (int(fields[11]) + int(fields[12])) / TICKS_PER_S
    return ProcessUsage(
        role=role, pid=pid, resident_bytes=sizes.get("Rss:", 0), private_bytes=private_bytes, cpu_s=cpu_s
    )
