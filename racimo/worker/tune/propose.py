"""Proposers by name: those that come with Racimo, and a user's own class."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

from racimo.spec.errors import RacimoError
from racimo.spec.proposer import Proposer
from racimo.spec.study import StudySpec
from racimo.state.rungs import levels


def make_proposer(terms: StudySpec, seed: int, folder: Path) -> Proposer:
    """The proposer that the study names; a class of the run's own files is looked for in `folder`.

    `RacimoError` proposer-failed if that is not there; whatever else a user's code raises."""
    space, objectives = terms.parsed_space, terms.objectives
    compared = levels(terms) if terms.scheduler != "none" else ()
    if terms.proposer == "cma-es":
        from racimo.worker.tune.propose_cma import CmaProposer

        return CmaProposer(space, objectives, seed, limits=terms.limits, levels=compared)
    if terms.proposer == "gp" and len(objectives) == 1:
        from racimo.worker.tune.propose_gp import GaussianProposer

        return GaussianProposer(space, objectives, seed, limits=terms.limits, rounds=terms.rounds)
    if not terms.proposer_file:
        from racimo.worker.tune.propose_optuna import OptunaProposer

        return OptunaProposer(
            space, objectives, seed, name=terms.proposer, limits=terms.limits, levels=compared
        )  # fmt: skip
    made = _class_of(terms.proposer, folder)(space, objectives, seed)
    if not isinstance(made, Proposer):
        raise RacimoError(
            "proposer-failed", f"{terms.proposer} has no ask(count) and tell(results)", "racimo.spec.proposer.Proposer"
        )
    return made


def _class_of(proposer: str, folder: Path) -> Any:
    """`FILE.py:CLASS`, the file imported as a module."""
    file, _, name = proposer.rpartition(":")
    path = folder / file
    if not path.is_file():
        raise RacimoError("proposer-failed", f"there is no file {file} among the run's files", f"ls {file}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    sys.path.insert(0, str(path.parent))
    spec.loader.exec_module(module)
    found = getattr(module, name, None)
    if not callable(found):
        classes = sorted(key for key, value in vars(module).items() if isinstance(value, type))
        raise RacimoError("proposer-failed", f"{file} has no class {name}; it has {', '.join(classes) or 'none'}")
    return found
