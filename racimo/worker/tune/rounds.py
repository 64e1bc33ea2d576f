"""`for round in run.rounds(...)`: a loop of whole rounds that goes on where it was, for what is no `run.steps` loop.

After each round the `state`, a dict, is what the run goes on from: values that have `state_dict` and `load_state_dict`
by these, all others pickled. It is written to the run's own folder often enough that it costs little, always when the
run is to leave the loop, and each time as a whole. Every round begins with seeds of its own, so that one that goes on
computes what an undisturbed one would.
"""

import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from racimo.agent.kept import keep, newest_kept
from racimo.spec.errors import RacimoError
from racimo.worker.train import seeds
from racimo.worker.train.telemetry import say
from racimo.worker.tune.pace import Pace

KIND = "pickle"


class Rounds:
    """The loop's own side. `beside` is saved with the state and given back with it: what the trial has told. `folder`
    None: nothing is saved."""

    def __init__(self, folder: Path | None, until: int, state: dict[str, Any], seed: int = 0) -> None:
        if until < 1:
            raise RacimoError("steps-misused", f"rounds are counted from 1 up, not until {until}")
        if not isinstance(state, dict):
            raise RacimoError("steps-misused", f"state is a dict of what changes, not a {type(state).__name__}")
        self.done = 0
        self.until = until
        self._folder, self._state, self._seed = folder, state, seed
        self._saved = -1
        self._pace = Pace()

    def restore(self) -> Any:
        """Takes up what was saved; returns what was saved beside it, None if there was nothing."""
        kept = newest_kept(self._folder) if self._folder is not None else None
        if kept is None:
            return None
        try:
            # Written by this run in its own folder, which only its user can write to.
            saved = pickle.loads(kept.path.read_bytes())  # noqa: S301
            done, values, by_dict, beside = (saved[name] for name in ("round", "state", "by_dict", "beside"))
        except Exception as error:  # noqa: BLE001 - whatever unpickling the user's values raises
            say(f"{kept.path.name} cannot be read, the rounds begin anew: {error!r}")
            kept.path.unlink(missing_ok=True)
            return None
        for name, value in values.items():
            mine = self._state.get(name)
            if by_dict.get(name) and mine is not None:
                mine.load_state_dict(value)
            else:
                self._state[name] = value
        self.done = self._saved = done
        return beside

    def end_round(self, beside: Any, rounds: int | None = None, saved: Callable[[], None] = lambda: None) -> None:
        """The round is over. Saved, unless that would take too large a part of the time; then `saved` is called. A disk
        that does not take it is said. `rounds`: see `save`."""
        self.done += 1
        if self._pace.due:
            try:
                self.save(beside, rounds)
                saved()
            except OSError as error:
                say(f"round {self.done} could not be saved: {error}")

    def save(self, beside: Any, rounds: int | None = None) -> None:
        """The state after the rounds done, if it is not saved. It goes by `rounds`, those of the trial, or by its own.

        `OSError` if the disk does not take it; a value that cannot be pickled is an error of the user's."""
        if self._folder is None or self._saved == self.done:
            return
        with self._pace.saving():
            by_dict = {name: hasattr(value, "state_dict") for name, value in self._state.items()}
            values = {name: value.state_dict() if by_dict[name] else value for name, value in self._state.items()}
            content = {"round": self.done, "state": values, "by_dict": by_dict, "beside": beside}
            number = self.done if rounds is None else rounds
            keep(self._folder, number, KIND, lambda file: pickle.dump(content, file, protocol=pickle.HIGHEST_PROTOCOL))
        self._saved = self.done

    @property
    def numbers(self) -> Iterator[int]:
        """The rounds that are still to be done, from 1; each is seeded when it begins."""
        for number in range(self.done + 1, self.until + 1):
            seeds.seed_all(seeds.derive("round", self._seed, number))
            yield number
