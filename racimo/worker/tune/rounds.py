"""`for round in run.rounds(...)`: a loop of whole rounds that goes on where it was, for what is no `run.steps` loop.

After each round the `state`, a dict, is what the run goes on from: values that have `state_dict` and `load_state_dict`
by these, all others pickled. It is written to the run's own folder often enough that it costs little, always when the
run is asked to leave, and each time as a whole.
"""

import os
import pickle
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from racimo.spec.errors import RacimoError

STATE_FILE = "rounds.pickle"
MOST_OF_TIME = 0.05
"""Saving may take this part of the time between two rounds; where it takes more, not every round is saved."""


class Rounds:
    """The loop's own side. `beside` is saved with the state and given back with it: what the trial has reported."""

    def __init__(self, folder: Path, until: int, state: dict[str, Any]) -> None:
        if until < 1:
            raise RacimoError("steps-misused", f"rounds are counted from 1 up, not until {until}")
        self.done = 0
        self.until = until
        self._path = folder / STATE_FILE
        self._state = state
        self._saved = 0
        self._save_s = 0.0
        self._saved_at_s = time.monotonic()

    def restore(self) -> Any:
        """Takes up what was saved; returns what was saved beside it, None if there was nothing."""
        try:
            content = self._path.read_bytes()
        except FileNotFoundError:
            return None
        # Written by this run in its own folder, which only its user can write to.
        saved = pickle.loads(content)  # noqa: S301
        for name, value in saved["state"].items():
            mine = self._state.get(name)
            if saved["by_dict"].get(name) and mine is not None:
                mine.load_state_dict(value)
            else:
                self._state[name] = value
        self.done = self._saved = saved["round"]
        return saved["beside"]

    def end_round(self, beside: Any) -> None:
        """The round is over. Saved, unless that would take too large a part of the time."""
        self.done += 1
        if time.monotonic() - self._saved_at_s >= self._save_s / MOST_OF_TIME:
            self.save(beside)

    def save_within(self, beside: Any) -> bool:
        """In the middle of a round whose work is done: what follows a report in it is not done again."""
        self.done += 1
        try:
            self.save(beside)
        finally:
            self.done -= 1
        return True

    def save(self, beside: Any) -> None:
        """`OSError` if the disk does not take it; a value that cannot be pickled is an error of the user's."""
        begun_s = time.monotonic()
        by_dict = {name: hasattr(value, "state_dict") for name, value in self._state.items()}
        values = {name: value.state_dict() if by_dict[name] else value for name, value in self._state.items()}
        content = pickle.dumps(
            {"round": self.done, "state": values, "by_dict": by_dict, "beside": beside},
            protocol=pickle.HIGHEST_PROTOCOL,
        )
        self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        draft = self._path.with_suffix(".new")
        with open(draft, "wb", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
            file.write(content)
        draft.replace(self._path)
        self._saved, self._saved_at_s = self.done, time.monotonic()
        self._save_s = self._saved_at_s - begun_s

    @property
    def numbers(self) -> Iterator[int]:
        """The rounds that are still to be done, from 1."""
        return iter(range(self.done + 1, self.until + 1))
