"""How we measure: alternating runs, medians with their spread, ratios pair by pair, and one file of rows per benchmark.

Seconds are CLOCK_MONOTONIC unless a name says otherwise.
"""

import datetime
import importlib.metadata
import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

RESULTS = Path(__file__).parent / "results"
LIMIT_S = 345.0
"""Beyond this a benchmark starts no further round: each is to end within six minutes."""
QUICK_LIMIT_S = 90.0


def quick() -> bool:
    """`BENCH_QUICK=1` asks for the short form: it shows that everything runs, its numbers say little."""
    return os.environ.get("BENCH_QUICK", "") not in ("", "0")


def say(text: str) -> None:
    print(text, flush=True)


class Spread(msgspec.Struct, frozen=True):
    """Some measurements of one thing, in order of size: least, quartiles, greatest."""

    n: int
    min: float
    p25: float
    median: float
    p75: float
    max: float

    def __str__(self) -> str:
        return f"{self.median:.4g} ({self.min:.4g} to {self.max:.4g}, n={self.n})"


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear between the closest ranks, as numpy's default; `percent` from 0 to 100."""
    if not values or not 0 <= percent <= 100:
        raise ValueError(f"a percentile needs values and 0 to 100, not {len(values)} values and {percent}")
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def spread(values: Sequence[float]) -> Spread:
    low, high = percentile(values, 25), percentile(values, 75)
    return Spread(len(values), min(values), low, statistics.median(values), high, max(values))


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """`ours / theirs`, round by round: neighbours in time are compared, so that drift of the machine cancels.

    A round in which either is missing (the lists are cut to the shorter) is left out."""
    return [mine / other for mine, other in zip(ours, theirs, strict=False)]


class Deadline:
    """The time one benchmark may take, from its construction on."""

    def __init__(self, limit_s: float | None = None) -> None:
        self.limit_s = limit_s if limit_s is not None else (QUICK_LIMIT_S if quick() else LIMIT_S)
        self.start_s = time.monotonic()

    @property
    def left_s(self) -> float:
        return self.limit_s - (time.monotonic() - self.start_s)

    def share(self, part: float) -> "Deadline":
        """A deadline over `part` (0 to 1) of what is left."""
        return Deadline(max(0.0, self.left_s) * part)


def alternate(
    cases: Mapping[str, Callable[[], float]], rounds: int, deadline: Deadline, seed: int = 0
) -> dict[str, list[float]]:
    """Measures every case once a round, in another (seeded) order each round, until `rounds` or the deadline.

    The first round is always finished. A case that raises ends the benchmark: a number that is missing is not a number.
    """
    measured: dict[str, list[float]] = {name: [] for name in cases}
    order = random.Random(seed)
    longest_round_s = 0.0
    for number in range(rounds):
        if number and deadline.left_s < longest_round_s:
            say(f"  out of time after {number} of {rounds} rounds")
            break
        began_s = time.monotonic()
        for name in order.sample(sorted(cases), len(cases)):
            measured[name].append(cases[name]())
            say(f"  round {number + 1}/{rounds} {name}: {measured[name][-1]:.4g}")
        longest_round_s = max(longest_round_s, time.monotonic() - began_s)
    return measured


class Goal(msgspec.Struct, frozen=True):
    """What a value should be. `None` in a row means: published, no goal."""

    how: Literal["<=", ">=", "<", "=="]
    than: float

    def met(self, value: float) -> bool:
        return {
            "<=": value <= self.than,
            ">=": value >= self.than,
            "<": value < self.than,
            "==": value == self.than,
        }[self.how]

    def __str__(self) -> str:
        return f"{self.how} {self.than:g}"


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a result. `peers`: the same metric for others. `spread`: of our value. `meta`: the machine."""

    metric: str
    value: float | str | None
    unit: str
    goal: str | None = None
    met: bool | None = None
    peers: dict[str, Any] = {}
    spread: Spread | None = None
    note: str = ""
    meta: dict[str, Any] = {}


def row(
    metric: str,
    value: float | Sequence[float],
    unit: str,
    goal: Goal | None = None,
    *,
    peers: Mapping[str, Any] | None = None,
    note: str = "",
) -> Row:
    """A row of one value, or of the median of several. Peers given as lists become their spreads."""
    many = None if isinstance(value, int | float) else spread(value)
    one = many.median if many else float(value)  # type: ignore[arg-type]
    others = {name: spread(found) if isinstance(found, list) else found for name, found in (peers or {}).items()}
    return Row(
        metric=metric,
        value=round(one, 6),
        unit=unit,
        goal=str(goal) if goal else None,
        met=goal.met(one) if goal else None,
        peers=others,
        spread=many,
        note=note,
    )


def machine() -> dict[str, Any]:
    """What a number depends on: cores, memory, versions, load, day."""
    versions = {name: importlib.metadata.version(name) for name in ("torch", "numpy", "racimo")}
    memory_kib = int(Path("/proc/meminfo").read_text().split(maxsplit=2)[1])
    return {
        "cores": os.cpu_count(),
        "memory_gib": round(memory_kib / 2**20, 1),
        "python": platform.python_version(),
        "kernel": platform.release(),
        "versions": versions,
        "load_before": round(os.getloadavg()[0], 2),
        "date": datetime.date.today().isoformat(),
        "quick": quick(),
    }


def write_rows(name: str, rows: Iterable[Row], meta: Mapping[str, Any], folder: Path = RESULTS) -> Path:
    """Writes `NAME.json`, a list of rows; a quick run goes beside it as `NAME.quick.json`, never over real numbers."""
    folder.mkdir(parents=True, exist_ok=True)
    stamped = [msgspec.structs.replace(one, meta=dict(meta) | one.meta) for one in rows]
    path = folder / (f"{name}.quick.json" if meta.get("quick") else f"{name}.json")
    path.write_bytes(msgspec.json.format(msgspec.json.encode(stamped), indent=1) + b"\n")
    return path


def table(rows: Iterable[Row]) -> str:
    """The rows for a terminal."""
    lines = []
    for one in rows:
        verdict = {True: "met", False: "NOT MET", None: ""}[one.met]
        value = f"{one.value:.4g}" if isinstance(one.value, float) else str(one.value)
        lines.append(f"  {one.metric:<58} {value:>10} {one.unit:<10} {one.goal or '':<10} {verdict}")
        lines += [f"      {name}: {found}" for name, found in one.peers.items()]
        lines += [f"      {one.note}"] if one.note else []
    return "\n".join(lines)
