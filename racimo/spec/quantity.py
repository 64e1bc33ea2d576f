"""Quantities as people write them: sizes, durations and ranges of worker counts.

Every parser raises `ValueError` with one sentence that says what was found and what is accepted.
"""

import re

import msgspec

_SIZE_UNITS = {
    "": 1, "b": 1,
    "k": 10**3, "kb": 10**3, "m": 10**6, "mb": 10**6, "g": 10**9, "gb": 10**9, "t": 10**12, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip
_DURATION_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_NUMBER_AND_UNIT = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")


def parse_size_bytes(text: str) -> int:
    """`"4GB"`, `"512MiB"` or `"1000"` in bytes."""
    match = _NUMBER_AND_UNIT.fullmatch(text)
    if match is None or match[2].lower() not in _SIZE_UNITS:
        raise ValueError(f"a size is a number and a unit such as 500MB or 4GiB, not {text!r}")
    return int(float(match[1]) * _SIZE_UNITS[match[2].lower()])


def parse_duration_s(text: str) -> float:
    """`"90s"`, `"10m"`, `"1.5h"` or `"250ms"` in seconds; a unit is required."""
    match = _NUMBER_AND_UNIT.fullmatch(text)
    if match is None or match[2].lower() not in _DURATION_UNITS:
        raise ValueError(f"a duration is a number and a unit such as 90s, 10m or 2h, not {text!r}")
    return float(match[1]) * _DURATION_UNITS[match[2].lower()]


def format_size(size_bytes: float) -> str:
    """Bytes as a person reads them: `512 B`, `1.2 MB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if size_bytes < 999.5:
            return f"{size_bytes:.0f} {unit}" if unit == "B" or size_bytes >= 100 else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1000
    return f"{size_bytes:.1f} TB"


def format_duration(duration_s: float) -> str:
    """Seconds as a person reads them: `0.4s`, `42s`, `3m 05s`, `2h 07m`, `4d 03h`."""
    if duration_s < 10:
        return f"{duration_s:.1f}s"
    seconds = round(duration_s)
    if seconds < 60:
        return f"{seconds}s"
    if seconds < 3600:
        return f"{seconds // 60}m {seconds % 60:02d}s"
    if seconds < 86400:
        return f"{seconds // 3600}h {seconds % 3600 // 60:02d}m"
    return f"{seconds // 86400}d {seconds % 86400 // 3600:02d}h"


class WorkerRange(msgspec.Struct, frozen=True, order=True):
    """How many workers a run may have, `least` and `most` included."""

    least: int
    most: int

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most:
            raise ValueError(f"workers are a count or a range such as 2 or 2..4, from 1 up, not {self}")

    def __str__(self) -> str:
        return str(self.least) if self.least == self.most else f"{self.least}..{self.most}"

    @property
    def elastic(self) -> bool:
        return self.least != self.most


def parse_worker_range(value: str | int) -> WorkerRange:
    """`4`, `"4"`, `"2..4"` or torchrun's `"2:4"`."""
    text = str(value).strip()
    match = re.fullmatch(r"([0-9]+)(?:(?:\.\.|:)([0-9]+))?", text)
    if match is None:
        raise ValueError(f"workers are a count or a range such as 2 or 2..4, not {text!r}")
    least = int(match[1])
    return WorkerRange(least, int(match[2]) if match[2] else least)
