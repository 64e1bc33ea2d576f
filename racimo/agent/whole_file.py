"""Files that are there whole or not at all, whoever is killed in the middle."""

import os
from pathlib import Path


def write_whole(path: Path, content: bytes) -> None:
    """Writes beside the file and renames (0600). `OSError` leaves what was there before."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with open(fd, "wb") as file:
            file.write(content)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
