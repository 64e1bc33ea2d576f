"""`python -m bench.report`: writes the tables of `docs/benchmarks.md` from `bench/results/*.json`, misses first."""

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from bench.__main__ import BENCHMARKS
from bench.harness import RESULTS, Row, Spread

PAGE = Path(__file__).parent.parent / "docs" / "benchmarks.md"
BEGIN, END = "<!-- tables: python -m bench.report -->", "<!-- end of tables -->"


def number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float | int) else str(value)


def spread_words(found: Spread | None) -> str:
    return "" if found is None else f" ({found.min:.3g} to {found.max:.3g}, n={found.n})"


def peer_words(peers: dict[str, Any]) -> str:
    words = []
    for name, found in peers.items():
        if isinstance(found, dict) and "median" in found:
            found = msgspec.convert(found, Spread)
            words.append(f"{name} {found.median:.4g}{spread_words(found)}")
        else:
            words.append(f"{name} {number(found)}")
    return "; ".join(words)


def table(rows: Iterable[Row]) -> list[str]:
    lines = ["| metric | value | goal | met | beside it |", "|---|---|---|---|---|"]
    for one in rows:
        met = {True: "yes", False: "**no**", None: ""}[one.met]
        value = f"{number(one.value)} {one.unit}{spread_words(one.spread)}"
        lines.append(f"| {one.metric} | {value} | {one.goal or ''} | {met} | {peer_words(one.peers)} |")
    return lines


def load(name: str) -> list[Row] | None:
    path = RESULTS / f"{name}.json"
    return msgspec.json.decode(path.read_bytes(), type=list[Row]) if path.exists() else None


def sections() -> list[str]:
    found = {name: load(name) for name in BENCHMARKS}
    missed = [(name, one) for name, rows in found.items() for one in rows or () if one.met is False]
    lines = ["## Where it falls short", ""]
    lines += [f"- [{name}] {one.metric}: {number(one.value)} {one.unit}, goal {one.goal}." for name, one in missed]
    lines += [f"- [{name}] has not been measured on this version." for name, rows in found.items() if rows is None]
    if len(lines) == 2:
        lines.append("No goal was missed in the runs below.")
    for name, rows in found.items():
        if rows is None:
            continue
        meta = rows[0].meta
        versions = ", ".join(f"{package} {version}" for package, version in meta["versions"].items())
        lines += ["", f"## {name}", "", f"`make bench NAME={name}` on {meta['date']}: {meta['cores']} cores, "]
        lines[-1] += (
            f"{meta['memory_gib']} GiB, Python {meta['python']}, {versions}; load before {meta['load_before']}."
        )
        lines += ["", *table(rows)]
        notes = list(dict.fromkeys(one.note for one in rows if one.note))
        lines += ["", *(f"- {note}" for note in notes)] if notes else []
    return lines


def main() -> int:
    page = PAGE.read_text()
    before, _, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        print(f"{PAGE} has no place for the tables: {BEGIN} … {END}", file=sys.stderr)
        return 2
    PAGE.write_text("\n".join([before + BEGIN, "", *sections(), "", END + after]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
