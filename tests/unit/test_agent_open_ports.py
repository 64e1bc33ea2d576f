"""What listens on this machine for others, and whose it is; and what an environment's building says meanwhile."""

import asyncio
import os
import re
import socket
import sys
import time
from pathlib import Path

import pytest

from racimo.agent import environments
from racimo.agent.environments import Environments
from racimo.agent.open_ports import open_ports
from racimo.agent.processes import record_of


def listener(address: str) -> socket.socket:
    return socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET)


def test_ports_that_others_reach_are_found_with_their_owner_and_loopback_is_not() -> None:
    record = record_of(os.getpid(), "agent", time.monotonic())
    assert record is not None
    with listener("0.0.0.0") as wide, listener("127.0.0.1") as narrow, listener("::1") as narrow6:
        found = {port.port: port for port in open_ports([record])}
        assert found[wide.getsockname()[1]].owner == "agent"
        assert found[wide.getsockname()[1]].address == "0.0.0.0"
        assert narrow.getsockname()[1] not in found and narrow6.getsockname()[1] not in found
        assert all(port.owner != "agent" for port in open_ports([]))


def test_rays_processes_are_named_and_others_are_not(tmp_path: Path) -> None:
    proc = tmp_path / "proc"
    (proc / "net").mkdir(parents=True)
    line = "   0: {address}:{port:04X} 00000000:0000 {state} 00000000:00000000 00:00000000 00000000 0 0 {inode} 1"
    rows = [
        line.format(address="0100000A", port=6379, state="0A", inode=11),
        line.format(address="00000000", port=8443, state="0A", inode=12),
        line.format(address="0100000A", port=50000, state="01", inode=13),
        line.format(address="0100007F", port=7000, state="0A", inode=14),
    ]
    (proc / "net" / "tcp").write_text("\n".join(["header", *rows]))
    (proc / "net" / "tcp6").write_text(
        "header\n" + line.format(address="0000000000000000FFFF00000100007F", port=99, state="0A", inode=15)
    )
    commands = {7: b"/x/site-packages/ray/core/src/ray/gcs/gcs_server\0--port=6379\0", 8: b"nginx\0"}
    for pid, inode in ((7, 11), (8, 12)):
        (proc / str(pid) / "fd").mkdir(parents=True)
        (proc / str(pid) / "cmdline").write_bytes(commands[pid])
        (proc / str(pid) / "fd" / "3").symlink_to(f"socket:[{inode}]")
    found = open_ports([], proc)
    assert [(port.address, port.port, port.owner) for port in found] == [
        ("10.0.0.1", 6379, "ray gcs_server"),
        ("0.0.0.0", 8443, ""),
    ]


def test_who_waits_for_an_environment_hears_where_since_when_and_what_the_installer_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    script = f"print('Collecting wheel-of-cheese', flush=True); open({str(gate)!r}).read()"
    monkeypatch.setattr(environments, "_installer", lambda python: (sys.executable, "-c", script))

    async def scene() -> None:
        built = Environments(tmp_path / "envs", "far-host")
        assert built.warnings == ()
        getting = asyncio.create_task(built.get("wheel-of-cheese==1\n"))
        async with asyncio.timeout(60):
            while not any("wheel-of-cheese" in warning for warning in built.warnings):
                await asyncio.sleep(0.01)
        (warning,) = built.warnings
        assert re.fullmatch(
            r"far-host has been building the environment \w+ for \d+ s: Collecting wheel-of-cheese", warning
        )
        await asyncio.to_thread(gate.write_text, "")
        await getting
        assert built.warnings == ()

    asyncio.run(scene())
