"""What a run left in its output folder on this node: listing and reading, and nothing outside of that folder."""

import os
import re
import stat
from pathlib import Path

from racimo.agent.protocol import OutputChunk, OutputFile
from racimo.spec.errors import RacimoError
from racimo.spec.home import Home

MAX_LISTED = 10_000
MAX_BESIDE = 20
MAX_LOOKED_AT = 50_000
"""Files of a working folder that are looked at for being new."""
MAX_CHUNK_BYTES = 4 * 2**20
_ESCAPED_BYTE = re.compile(rb"\\x([89a-f][0-9a-f])")


def list_outputs(root: Path) -> list[OutputFile]:
    """Files below `root`, by path; symbolic links are listed if they lead to a file inside it. Blocks on the disk."""
    found: list[OutputFile] = []
    real_root = os.path.realpath(root)
    for folder, _, names in os.walk(root):
        for name in names:
            path = Path(folder, name)
            try:
                status = path.stat()
            except OSError:
                continue  # gone meanwhile, or a link to nowhere
            inside = not path.is_symlink() or _is_inside(os.path.realpath(path), real_root)
            if stat.S_ISREG(status.st_mode) and inside:
                relative = _shown(path.relative_to(root).as_posix())
                found.append(OutputFile(path=relative, size_bytes=status.st_size, modified_wall_s=status.st_mtime))
            if len(found) >= MAX_LISTED:
                return sorted(found, key=lambda file: file.path)
    return sorted(found, key=lambda file: file.path)


def files_beside(home: Home, run: str) -> list[str]:
    """Files in the working folder of the run's newest attempt here that are newer than its workers, at most
    `MAX_BESIDE`: what a script wrote there by mistake, since they are no outputs. Blocks on the disk."""
    attempts = [int(path.name) for path in (home.node_dir / "files" / run).glob("[0-9]*") if path.name.isdigit()]
    if not attempts:
        return []
    root, workers = home.attempt_files_dir(run, max(attempts)), home.node_dir / "workers" / run / str(max(attempts))
    began_ns = min((path.stat().st_mtime_ns for path in workers.glob("*/worker.json")), default=None)
    found: list[str] = []
    looked_at = 0
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if name != "__pycache__")
        for name in sorted(names):
            path = Path(folder, name)
            looked_at += 1
            try:
                status = path.lstat()
            except OSError:
                continue  # gone meanwhile
            if began_ns is not None and stat.S_ISREG(status.st_mode) and status.st_mtime_ns > began_ns:
                found.append(_shown(path.relative_to(root).as_posix()))
            if len(found) >= MAX_BESIDE or looked_at >= MAX_LOOKED_AT:
                return found
    return found


def _shown(path: str) -> str:
    """A path as text: bytes of it that are no UTF-8 appear as `\\xff`."""
    return os.fsencode(path).decode(errors="backslashreplace")


def _from_shown(path: str) -> str:
    return os.fsdecode(_ESCAPED_BYTE.sub(lambda match: bytes.fromhex(match[1].decode()), os.fsencode(path)))


def open_output(root: Path, path: str) -> tuple[int, int]:
    """(file descriptor, size in bytes) of one output. Where the path leads is judged by what was opened, so a link
    changed in the last moment leads nowhere. `RacimoError` output-missing."""
    missing = RacimoError("output-missing", f"there is no output {path!r}", "racimo get RUN  # lists them")
    parts = path.split("/")
    if not path or path.startswith("/") or "\0" in path or ".." in parts:
        raise missing
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
    try:
        fd = os.open(root.joinpath(*parts), flags)
    except OSError:
        try:
            fd = os.open(root.joinpath(*(_from_shown(part) for part in parts)), flags)
        except OSError:
            raise missing from None
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise missing
        if not _is_inside(str(Path(f"/proc/self/fd/{fd}").readlink()), os.path.realpath(root)):
            raise RacimoError(
                "output-missing", f"the output {path!r} is a link that leads out of the run's output folder"
            )
    except BaseException:
        os.close(fd)
        raise
    return fd, status.st_size


def _is_inside(real_path: str, real_root: str) -> bool:
    return real_path.startswith(real_root.rstrip("/") + "/")


def read_output(root: Path, path: str, offset: int, limit: int) -> OutputChunk:
    """A piece of one output, at most `MAX_CHUNK_BYTES`. `RacimoError` output-missing. Blocks on the disk."""
    fd, size_bytes = open_output(root, path)
    try:
        limit = min(max(limit, 1), MAX_CHUNK_BYTES)
        return OutputChunk(content=os.pread(fd, limit, max(offset, 0)), size_bytes=size_bytes)
    finally:
        os.close(fd)


def check_run_name(run: str) -> None:
    """`RacimoError` invalid-request for what cannot be a run's id: it becomes the name of a folder."""
    if not run or "/" in run or "\0" in run or run.startswith("."):
        raise RacimoError("invalid-request", f"not a run id: {run!r}")
