"""What nodes and the processes on them use: the agents say it, the control process adds what is its own."""

import asyncio
import logging
import os
from collections.abc import Iterable
from pathlib import Path

from racimo.act.guardian import read_live
from racimo.agent.protocol import ProcessUsage, Usage, UsageReply
from racimo.control.carrier import Carrier
from racimo.spec.errors import RacimoError

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
USAGE_TIMEOUT_S = 1.0
MAX_ASKED_AT_ONCE = 100

log = logging.getLogger("racimo.control.usage")


async def usage_of(carrier: Carrier, nodes: Iterable[str]) -> dict[str, UsageReply]:
    """What the agents of these nodes say of them; without those that do not answer in time."""
    slots = asyncio.Semaphore(MAX_ASKED_AT_ONCE)
    asked = list(set(nodes) & carrier.connected_nodes)
    replies = await asyncio.gather(*(_ask(carrier, node, slots) for node in asked))
    return {node: reply for node, reply in zip(asked, replies, strict=True) if reply is not None}


async def _ask(carrier: Carrier, node: str, slots: asyncio.Semaphore) -> UsageReply | None:
    async with slots:
        try:
            async with asyncio.timeout(USAGE_TIMEOUT_S):
                reply = await carrier.request(node, Usage())
        except (RacimoError, TimeoutError) as error:
            log.info("the agent of %s does not say what is used there: %s", node, error)
            return None
    assert isinstance(reply, UsageReply)
    return reply


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
