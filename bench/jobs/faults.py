"""SIGKILLs at exact points of a step, from within: a schedule that all workers of a run hold, each entry used once.

An entry is `{"step", "phase", "rank", "delay_s"}`. It falls due at its step, in the worker whose rank it names (modulo
the workers there are), and only where somebody else survives. A file per entry in the output folder, created
exclusively, is the claim; it says what really happened.
"""

import json
import os
import signal
import threading
from pathlib import Path
from typing import Any


class Faults:
    def __init__(self, kills: list[dict[str, Any]], run: Any, folder: Path) -> None:
        self._kills, self._run, self._folder = kills, run, folder
        self._next = 0
        self._due: dict[str, Any] | None = None
        self._step = 0
        self._timer: threading.Timer | None = None

    def begin(self, step: int) -> None:
        """A step begins; is an entry due here?"""
        self._step, self._due = step, None
        while self._next < len(self._kills) and self._claim_path(self._next).exists():
            self._next += 1
        if self._next == len(self._kills) or self._run.num_workers < 2:
            return
        if self._next and json.loads(self._claim_path(self._next - 1).read_text() or "{}").get("step", step) >= step:
            return  # its victim died in this very step: the group is not whole yet
        kill = self._kills[self._next]
        if step >= kill["step"] and self._run.rank == kill["rank"] % self._run.num_workers:
            self._due = kill

    def computing(self) -> None:
        """Between the forward passes of two micro-shards."""
        self._disarm()
        if self._due and self._due["phase"] == "compute":
            self._die("compute")

    def contributed(self) -> None:
        """After a backward pass. The exchange begins once no other micro-shard follows within the delay."""
        if self._due and self._due["phase"] == "exchange":
            self._timer = threading.Timer(self._due["delay_s"], self._die, ("exchange",))
            self._timer.start()

    def reduced(self) -> None:
        """After the exchange, before `apply`."""
        self._disarm()
        if self._due and self._due["phase"] in ("exchange", "apply"):
            self._die("apply")

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _die(self, phase: str) -> None:
        try:
            claim = os.open(self._claim_path(self._next), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        except FileExistsError:
            self._due = None
            return
        os.write(claim, json.dumps({"step": self._step, "phase": phase, "rank": self._run.rank}).encode())
        os.kill(os.getpid(), signal.SIGKILL)

    def _claim_path(self, number: int) -> Path:
        return self._folder / f"kill-{number}.json"
