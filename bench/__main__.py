"""`python -m bench [NAME...]`: runs one benchmark, some, or all; writes `bench/results/NAME.json`.

BENCH_QUICK=1 runs the short form. Exit 1 if a benchmark could not be run or a goal was missed.
"""

import compileall
import importlib
import sys
import time
import traceback
from pathlib import Path

from bench.harness import machine, quick, say, table, write_rows
from bench.peers import PeerMissing

ROOT = Path(__file__).parent.parent
BENCHMARKS = (
    "start",
    "first-step",
    "step",
    "bits",
    "recovery",
    "goodput",
    "crash",
    "cli",
    "churn",
    "black-hole",
    "join",
    "head",
    "slow-step",
    "hosts-goodput",
    "fleet",
    "ship",
    "trials",
    "tune-start",
    "tune-lines",
    "tune-tables",
    "tune-nan",
    "tune-scale",
    "tune-budget",
)


def run(name: str) -> bool:
    """True if it ran and met every goal."""
    say(f"\n[{name}]" + (" (short form)" if quick() else ""))
    meta = machine()
    began_s = time.monotonic()
    try:
        rows = importlib.import_module(f"bench.{name.replace('-', '_')}").run()
    except PeerMissing as error:
        say(f"[{name}] could not be measured: {error}")
        return False
    except Exception:  # noqa: BLE001 - one benchmark that breaks must not take the others along; it is shown and counted
        traceback.print_exc()
        say(f"[{name}] could not be measured")
        return False
    path = write_rows(name, rows, meta)
    say(f"{table(rows)}\n  {time.monotonic() - began_s:.0f} s, written to {path}")
    return all(one.met is not False for one in rows)


def main(names: list[str]) -> int:
    unknown = [name for name in names if name not in BENCHMARKS]
    if unknown:
        say(f"no benchmark is called {unknown[0]!r}; there are: {', '.join(BENCHMARKS)}")
        return 2
    for folder in ("racimo", "bench"):
        compileall.compile_dir(ROOT / folder, quiet=1)  # as in an installed package
    good = [run(name) for name in names or BENCHMARKS]
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
