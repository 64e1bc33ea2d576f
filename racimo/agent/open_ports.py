"""TCP ports of this machine that others can reach, and whose they are: from `/proc`, in this network namespace."""

import socket
from collections.abc import Iterable
from pathlib import Path

from racimo.agent.processes import ProcessRecord
from racimo.agent.protocol import ListeningPort

LISTEN = "0A"
RAY_MARKS = (b"ray::", b"/ray/", b"ray.util.", b"raylet", b"gcs_server")
MAX_PORTS = 200


def open_ports(own: Iterable[ProcessRecord], proc: Path = Path("/proc")) -> tuple[ListeningPort, ...]:
    """Listening ports but those on loopback. `owner`: the role of one of `own`, `ray` and its program, or ""."""
    ports = {}
    for name in ("tcp", "tcp6"):
        try:
            lines = (proc / "net" / name).read_text().splitlines()[1:]
        except FileNotFoundError:
            continue  # a kernel without IPv6
        for line in lines:
            fields = line.split()
            address, _, port = fields[1].rpartition(":")
            place = (_address(address), int(port, 16))
            if fields[3] == LISTEN and not _is_loopback(place[0]):
                ports[fields[9]] = place
    owners = _owners(set(ports), {record.pid: record.role for record in own}, proc) if ports else {}
    found = {ListeningPort(*place, owners.get(inode, "")) for inode, place in ports.items()}
    return tuple(sorted(found, key=lambda port: (port.port, port.address)))[:MAX_PORTS]


def _address(text: str) -> str:
    """`0100007F`: words of four bytes, each in the machine's (little-endian) order."""
    raw = b"".join(bytes.fromhex(text[at : at + 8])[::-1] for at in range(0, len(text), 8))
    return socket.inet_ntop(socket.AF_INET if len(raw) == 4 else socket.AF_INET6, raw)


def _is_loopback(address: str) -> bool:
    return address == "::1" or address.removeprefix("::ffff:").startswith("127.")


def _owners(inodes: set[str], roles: dict[int, str], proc: Path) -> dict[str, str]:
    """Who holds these sockets, among our own processes and Ray's."""
    owners = {}
    for folder in proc.iterdir():
        if not folder.name.isdigit():
            continue
        try:
            owner = roles.get(int(folder.name)) or _ray_program(folder)
            if not owner:
                continue
            for fd in (folder / "fd").iterdir():
                target = str(fd.readlink())
                inode = target.removeprefix("socket:[").rstrip("]")
                if inode in inodes and target.startswith("socket:["):
                    owners[inode] = owner
        except OSError:
            continue  # gone meanwhile, or another user's
    return owners


def _ray_program(folder: Path) -> str:
    """`ray NAME` for a process of Ray's, "" for others."""
    command = (folder / "cmdline").read_bytes()[:4096]
    if not any(mark in command for mark in RAY_MARKS):
        return ""
    words = [word.decode(errors="replace") for word in command.split(b"\0") if word]
    scripts = [word for word in words[:8] if "/ray/" in word and word.endswith((".py", "raylet", "gcs_server"))]
    name = Path(scripts[-1] if scripts else words[0]).name
    return f"ray {name.split()[0][:30]}"
