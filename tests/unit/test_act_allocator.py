"""What a process that passed on large pieces keeps of them."""

import subprocess
import sys

PROGRAM = """
import sys
from pathlib import Path
from racimo.act.allocator import give_back_freed_memory

def resident_mb():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6

if sys.argv[1] == "yes":
    give_back_freed_memory()
before = resident_mb()
bytes(30_000_000)  # glibc keeps pieces of this size on its heap from now on
pieces = [b"x" * 1_000_000 for _ in range(100)]
last = bytearray(2_000)  # lies above them there, so that the heap cannot shrink
del pieces
print(resident_mb() - before)
"""


def kept_mb(asked: str) -> float:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, asked], capture_output=True, text=True, check=True, timeout=60
    )
    return float(done.stdout)


def test_what_was_freed_is_given_back() -> None:
    assert kept_mb("yes") < 20
