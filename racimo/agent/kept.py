"""What a trial has kept: one file in its folder, named by the rounds that it holds, written by its worker as a whole.

`trials/N/after-12-rounds.pt` is the state after the trial's twelfth round (`.pt`: of `run.steps`, readable by
`torch.load`; `.pickle`: of `run.rounds`). A newer one takes the place of the older.
"""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import msgspec

_NAME = re.compile(r"after-(\d{1,18})-rounds\.(pt|pickle)")
DRAFT_SUFFIX = ".new"


class Kept(msgspec.Struct, frozen=True):
    """A state on this machine's disk."""

    rounds: int
    path: Path


def trial_folder(output_dir: Path, trial: int) -> Path:
    """Where a trial's outputs and its state lie."""
    return output_dir / "trials" / str(trial)


def is_kept_name(name: str) -> bool:
    """Whether a file of this name can be a state: nothing that comes from elsewhere is stored under another one."""
    return _NAME.fullmatch(name) is not None


def rounds_of(name: str) -> int:
    """The rounds that a state of this name holds."""
    match = _NAME.fullmatch(name)
    assert match is not None, name
    return int(match[1])


def newest_kept(folder: Path) -> Kept | None:
    """The state with the most rounds; None without any."""
    try:
        paths = list(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return None
    found = [Kept(int(match[1]), path) for path in paths if (match := _NAME.fullmatch(path.name))]
    return max(found, key=lambda kept: kept.rounds, default=None)


def keep(folder: Path, rounds: int, kind: str, write: Callable[[BinaryIO], None]) -> Kept:
    """Writes a state and drops the older ones. `kind` is `pt` or `pickle`. `OSError` if the disk does not take it, or
    whatever `write` raises; then what there was is there still."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = folder / f"after-{rounds}-rounds.{kind}"
    draft = path.with_name(path.name + DRAFT_SUFFIX)
    try:
        with open(draft, "wb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            write(file)
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    drop_others(folder, path)
    return Kept(rounds, path)


def drop_others(folder: Path, kept: Path) -> None:
    """Of several states only this one counts; another one may have fewer rounds, or more and be of no use."""
    for path in list(folder.iterdir()):
        if _NAME.fullmatch(path.name) and path.name != kept.name:
            path.unlink(missing_ok=True)
