"""What `run.steps` saves in a trial: its whole state in one file, between two steps, as often as that costs little."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from racimo.agent.kept import keep, newest_kept
from racimo.worker.train.state import StateTree, Trained
from racimo.worker.train.telemetry import say
from racimo.worker.tune.pace import Pace
from racimo.worker.tune.trial import Trial

KIND = "pt"


class Keeper:
    """Of one trial's loop over `run.steps`; also where its slices end (`worker.train.position.Keeps`)."""

    def __init__(self, trial: Trial, folder: Path) -> None:
        self._trial, self._folder = trial, folder
        self._pace = Pace()
        self._saved = 0
        """Step of the newest state saved."""
        self._now: tuple[int, Callable[[], StateTree]] = (0, dict)
        trial.keep, trial.looping = self.save, True

    def restore(self, trained: Trained) -> int | None:
        """Loads what was saved, and returns its step; None if there is nothing. What another trial saved (this one is
        its clone) leaves the optimizers' own settings as they are."""
        kept = newest_kept(self._folder)
        content = _read(kept.path) if kept is not None else None
        if content is None:
            self._trial.take_up(None)
            return None
        tree = content["trained"]
        if content["trial"] != self._trial.number:
            _keep_own_settings(tree, trained.capture())
        trained.load(tree)
        self._trial.take_up(content["told"])
        self._saved = content["step"]
        return self._saved

    def boundary(self, step: int, capture: Callable[[], StateTree], last: bool = False) -> None:
        """Between two steps, or after the last. Saves if that costs little, and ends the slice if it is to: then
        `TrialLeft` may come."""
        self._now = step, capture
        if last or self._pace.due:
            try:
                self.save()
                self._trial.note_saved()
            except OSError as error:
                say(f"trial {self._trial.number} could not be saved after step {step}: {error}")
        self._trial.boundary()

    def end(self) -> None:
        """The loop is over: from here on slices end in reports again, and the state is what it is."""
        self._trial.keep, self._trial.looping = None, False
        self._now = (0, dict)

    def save(self) -> None:
        """The state of this boundary, if it is not saved. `OSError` if the disk does not take it."""
        step, capture = self._now
        if step <= self._saved:
            return
        told = self._trial.told_values
        with self._pace.saving():
            content = {"step": step, "trial": self._trial.number, "told": told, "trained": capture()}
            keep(self._folder, told["rounds"], KIND, lambda file: torch.save(content, file))
        self._saved = step


def _read(path: Path) -> dict[str, Any] | None:
    try:
        # Written by this run in its own folder, which only its user can write to.
        content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=False)
        _ = content["step"], content["trial"], content["told"], content["trained"]
    except Exception as error:  # noqa: BLE001 - whatever unpickling the user's state raises
        say(f"{path.name} cannot be read, the trial begins anew: {error!r}")
        path.unlink(missing_ok=True)
        return None
    return content


def _keep_own_settings(theirs: StateTree, own: StateTree) -> None:
    """In place: the optimizers' and schedules' numbers are this trial's, all that was learnt is the other's. A learning
    rate that its schedule has changed since is changed by as much from where this one's begins."""
    for their_state, own_state in zip(_listed(theirs["optimizer"]), _listed(own["optimizer"]), strict=False):
        for their_group, own_group in zip(their_state["param_groups"], own_state["param_groups"], strict=False):
            begun, now = their_group.get("initial_lr"), their_group.get("lr")
            their_group.update({name: value for name, value in own_group.items() if name != "params"})
            if begun and "initial_lr" in own_group:
                their_group["lr"] = own_group["initial_lr"] * (now / begun)
    for name, value in own["state"].items():
        saved = theirs["state"].get(name)
        if isinstance(value, Mapping) and isinstance(saved, dict) and "base_lrs" in value and "base_lrs" in saved:
            begun, saved["base_lrs"] = saved["base_lrs"], value["base_lrs"]
            rates = zip(saved.get("_last_lr", ()), begun, saved["base_lrs"], strict=False)
            saved["_last_lr"] = [mine * (last / first) if first else mine for last, first, mine in rates]


def _listed(states: Any) -> list[dict[str, Any]]:
    return states if isinstance(states, list) else [states]
