"""Whether a folder can be a cluster's home: on a local disk, and private. Called by `racimo up` and by the control
process at its start, and in another form by `racimo join`."""

import contextlib
import os
import re
import socket
import stat
from pathlib import Path

import msgspec

from racimo.spec.errors import RacimoError
from racimo.spec.home import Home

NETWORK_FILESYSTEMS = frozenset({
    "nfs", "nfs3", "nfs4", "cifs", "smb2", "smb3", "smbfs", "9p", "ceph", "lustre", "afs", "openafs", "ncpfs", "gfs",
    "gfs2", "ocfs2", "gpfs", "beegfs", "pvfs2", "orangefs", "panfs", "glusterfs", "davfs", "coda", "virtiofs", "vboxsf",
    "prl_fs", "wekafs",
})  # fmt: skip
"""File systems where SQLite's WAL is not safe, because the files may be written from several machines."""

NETWORK_FUSE = frozenset({
    "sshfs", "s3fs", "gcsfuse", "goofys", "glusterfs", "ceph", "ceph-fuse", "davfs", "davfs2", "rclone", "juicefs",
    "mfs", "moosefs", "curlftpfs", "smbnetfs", "blobfuse", "blobfuse2", "beegfs", "mount-s3", "weka", "lizardfs",
    "alluxio",
})  # fmt: skip
"""The same as `fuse.NAME`."""

_HINT = "export RACIMO_HOME=/var/tmp/racimo-$USER   # any private folder on a disk of this machine"
_OCTAL = re.compile(r"\\([0-7]{3})")


def filesystem_of(path: str, mountinfo: str) -> tuple[str, str]:
    """(kind of file system, mount point) that holds `path`, an absolute and resolved path, by the text of
    `/proc/self/mountinfo`. ("", "") if nothing there holds it."""
    found = ("", "")
    for line in mountinfo.splitlines():
        left, separator, right = line.partition(" - ")
        fields, tail = left.split(" "), right.split(" ")
        if not separator or len(fields) < 6 or not tail[0]:
            continue
        mount_point = _OCTAL.sub(lambda match: chr(int(match[1], 8)), fields[4])
        holds = path == mount_point or path.startswith(mount_point.rstrip("/") + "/")
        if holds and len(mount_point) >= len(found[1]):  # of several at one point the last is on top
            found = (tail[0], mount_point)
    return found


def is_network(kind: str) -> bool:
    family, _, name = kind.partition(".")
    return kind in NETWORK_FILESYSTEMS or (family in ("fuse", "fuseblk") and name in NETWORK_FUSE)


class Owner(msgspec.Struct, frozen=True):
    """`node/host.json`: the machine whose agent lives in a home on a network file system."""

    machine: str
    host: str


def check_home(home: Home) -> None:
    """Makes the home if it is not there (0700) and refuses one that cannot keep a journal.

    `RacimoError`: `home-on-network-filesystem`, `home-not-private`, or `start-failed` if it cannot be made.
    """
    kind, mount_point = _place(home)
    if is_network(kind):
        raise RacimoError(
            "home-on-network-filesystem",
            f"{home.root} is on {kind} (mounted at {mount_point}), where the journal's write-ahead log is not safe",
            _HINT,
        )
    _make_private(home.root)


def check_joined_home(home: Home) -> None:
    """The same for a machine that joins: it keeps no journal, so a network file system will do, but every machine needs
    a home of its own there. The first to come owns it.

    `RacimoError`: `join-refused` naming the owner, `home-not-private`, `start-failed`.
    """
    kind, mount_point = _place(home)
    _make_private(home.root)
    if not is_network(kind):
        return
    own = Owner(_machine_id(), socket.gethostname())
    path = home.node_dir / "host.json"
    try:
        home.node_dir.mkdir(mode=0o700, exist_ok=True)
        with contextlib.suppress(FileExistsError), open(path, "xb") as file:  # the server lets one of several through
            file.write(msgspec.json.encode(own))
        found = msgspec.json.decode(path.read_bytes(), type=Owner)
    except (OSError, msgspec.MsgspecError) as error:
        raise RacimoError("start-failed", f"cannot use {path}: {error}", _HINT) from error
    if found != own:
        raise RacimoError(
            "join-refused",
            f"{home.root} is on {kind} (mounted at {mount_point}) and is the home of another machine, {found.host}:"
            " each needs one of its own",
            f"{_HINT}; if {found.host} is this machine's old name: rm {path}",
        )


def _place(home: Home) -> tuple[str, str]:
    mountinfo = Path("/proc/self/mountinfo").read_text()
    return filesystem_of(os.path.realpath(home.root), mountinfo)


def _machine_id() -> str:
    """Of the installation; clones of one image share it, so it is compared together with the host's name."""
    try:
        return Path("/etc/machine-id").read_text().strip()
    except OSError:
        return ""


def _make_private(root: Path) -> None:
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = root.stat()
    except OSError as error:
        raise RacimoError("start-failed", f"cannot make {root}: {error.strerror}", _HINT) from error
    if not stat.S_ISDIR(found.st_mode):
        raise RacimoError("start-failed", f"{root} is not a folder", _HINT)
    if found.st_uid != os.geteuid():
        raise RacimoError(
            "home-not-private",
            f"{root} belongs to user {found.st_uid}, not to user {os.geteuid()} who starts this",
            _HINT,
        )
    if found.st_mode & 0o022:
        raise RacimoError(
            "home-not-private",
            f"other users can write to {root} (mode {stat.S_IMODE(found.st_mode):04o})",
            f"chmod 700 {root}",
        )
