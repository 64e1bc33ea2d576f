"""A study as one of Optuna, for its dashboard and its own analyses. A copy: nothing is ever read back."""

import math
import warnings
from typing import Any

from racimo.client.trial_table import TrialTable
from racimo.control.views import TrialView
from racimo.spec.errors import RacimoError
from racimo.spec.space import Parameter


def export_to_optuna(table: TrialTable, name: str, storage: str) -> tuple[int, int]:
    """Writes the study `name` to a storage of Optuna (`sqlite:///studies.db`); (trials written, those left out).

    Trials that had all their rounds or returned are complete; those that were left before are pruned, with the values
    of their rounds; those that diverged or failed have failed. Left out is what has told nothing yet.
    `RacimoError`: `extra-missing`, `invalid-request` if the storage has such a study or cannot be used."""
    try:
        import optuna
        from optuna.study import StudyDirection
        from sqlalchemy.exc import SQLAlchemyError
    except ImportError:
        raise RacimoError(
            "extra-missing", "this export needs Optuna, which is not installed here", "pip install 'racimo[tune]'"
        ) from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    directions = [StudyDirection.MINIMIZE if one.minimize else StudyDirection.MAXIMIZE for one in table.objectives]
    distributions = {name: _distribution(one) for name, one in table.space.parameters.items()}
    trials = [_frozen(table, trial, distributions) for _, trial in sorted(table.trials.items())]
    known = [trial for trial in trials if trial is not None]
    try:
        study = optuna.create_study(study_name=name, storage=storage, directions=directions)
        study.add_trials(known)
    except optuna.exceptions.DuplicatedStudyError:
        raise RacimoError(
            "invalid-request", f"{storage} has a study {name} already", f"another name: racimo export {name} --as NAME"
        ) from None
    except (optuna.exceptions.StorageInternalError, SQLAlchemyError, ImportError, ValueError) as error:
        raise RacimoError("invalid-request", f"Optuna cannot write to {storage}: {str(error).splitlines()[0]}",
                          "a storage of Optuna's is an address such as sqlite:///studies.db") from None  # fmt: skip
    return len(known), len(trials) - len(known)


def _distribution(parameter: Parameter) -> Any:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if parameter.kind == "choice":
        return CategoricalDistribution(parameter.choices)
    if parameter.kind == "int":
        step = int(parameter.step) or 1
        low = int(parameter.low)
        high = low + (int(parameter.high) - low) // step * step
        return IntDistribution(low, high, log=parameter.log, step=step)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that it ends a range at its last step, as this one does too
        return FloatDistribution(parameter.low, parameter.high, log=parameter.log, step=parameter.step or None)


def _frozen(table: TrialTable, trial: TrialView, distributions: dict[str, Any]) -> Any:
    """None for what has told nothing, or lies outside the space as it is now."""
    from optuna.trial import TrialState, create_trial

    parameters = table.space.parameters
    if any(name not in parameters or parameters[name].refuse(value) for name, value in trial.values.items()):
        return None
    values = [table.value(trial, index) for index in range(len(table.objectives))]
    if trial.status in ("diverged", "failed"):
        state = TrialState.FAIL
    elif trial.status == "finished" and None not in values:
        state = TrialState.COMPLETE
    elif trial.metrics:
        state = TrialState.PRUNED
    else:
        return None
    single = len(values) == 1
    return create_trial(
        state=state,
        values=[value for value in values if value is not None] if state == TrialState.COMPLETE else None,
        params=dict(trial.values),
        distributions={name: distributions[name] for name in trial.values},
        intermediate_values={round: value for round, value in trial.curve if math.isfinite(value)} if single else {},
        user_attrs={
            "racimo.trial": trial.number,
            "racimo.status": trial.status,
            "racimo.by": trial.by,
            "racimo.device_s": trial.device_s,
            **{f"metric.{name}": value for name, value in trial.metrics.items() if math.isfinite(value)},
        },
    )
