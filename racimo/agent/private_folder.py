"""Folders that hold sockets: ours alone, also where the path had to be a short one below /tmp."""

import os
import stat
from pathlib import Path

from racimo.spec.errors import RacimoError


def make_private_folder(path: Path) -> None:
    """Makes the folder (0700). `RacimoError` if it is a link or another user's."""
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise RacimoError(
            "home-not-private", f"{path} is not a folder of user {os.getuid()}: it belongs to user {found.st_uid}"
        )
    if found.st_mode & 0o077:
        path.chmod(0o700)
