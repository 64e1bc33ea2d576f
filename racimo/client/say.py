"""Talk for people, on stderr: what the client waits for, what it starts, what it sends."""

import sys
from collections.abc import Callable

Say = Callable[[str], None]


def to_stderr(text: str) -> None:
    print(f"racimo: {text}", file=sys.stderr, flush=True)
