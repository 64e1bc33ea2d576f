"""How much each parameter of a study matters: PED-ANOVA (Watanabe, Bansal, Hutter, IJCAI 2023, arXiv 2304.10255).

For each parameter two densities are compared: where the best trials have it, and where all trials have it. The Pearson
divergence between them, over a fixed grid, is how far choosing this parameter well separates the best from the rest.
The method reads trials by their rank only, and so suits a study whose trials had different numbers of rounds: one that
came further ranks before one that was left behind, and of two that came as far the better one does.
A parameter that is active in some trials only is judged among those.
"""

import math
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from racimo.client.trial_table import TrialTable
from racimo.control.views import TrialView
from racimo.spec.space import Parameter, identity

BEST_PART = 0.1
"""Which trials are the best ones: the paper's gamma."""
LEAST_BEST = 4
LEAST_TRIALS = 12
"""With fewer, nothing is said of a parameter."""
GRID_POINTS = 50
PRIOR_WEIGHT = 1.0
"""An even density counts as one more trial, so that no place has none."""

Densities = npt.NDArray[np.float64]


class Importance(msgspec.Struct, frozen=True):
    """`share` is of all parameters together, 0 to 1; None where too few trials had the parameter."""

    name: str
    share: float | None
    num_trials: int


def importance(table: TrialTable) -> list[Importance]:
    """Of each parameter for the first metric, the most important first, those unknown last."""
    ranked = _ranked(table)
    found: list[tuple[str, float | None, int]] = []
    for name, parameter in table.space.parameters.items():
        values = [trial.values[name] for trial in ranked if name in trial.values]
        values = [value for value in values if not parameter.refuse(value)]  # the space may have been another one
        if len(values) < LEAST_TRIALS:
            found.append((name, None, len(values)))
        elif parameter.num_values == 1:
            found.append((name, 0.0, len(values)))
        else:
            found.append((name, _divergence(parameter, values), len(values)))
    total = sum(part for _, part, _ in found if part is not None)
    shares = [
        Importance(name, None if part is None else part / total if total else 0.0, count) for name, part, count in found
    ]
    return sorted(shares, key=lambda one: -1.0 if one.share is None else one.share, reverse=True)


def _ranked(table: TrialTable) -> list[TrialView]:
    """All that told something, the best first; those that diverged or failed last."""
    told = [trial for trial in table.trials.values() if trial.metrics or trial.status in ("diverged", "failed")]
    return sorted(told, key=lambda trial: (not table.counts(trial), -trial.rounds, table.signed(trial), trial.number))


def _divergence(parameter: Parameter, values: Sequence[object]) -> float:
    """Pearson's, of the density of the best among `values` (ranked) from that of all."""
    num_best = min(max(LEAST_BEST, math.ceil(BEST_PART * len(values))), len(values) - 1)
    if parameter.kind == "choice":
        places = _choice_places(parameter, values)
        size = len(parameter.choices)
        best, whole = _counted(places[:num_best], size), _counted(places, size)
    else:
        units = np.array([parameter.unit_of(value) for value in values])  # type: ignore[arg-type]
        best, whole = _smoothed(units[:num_best]), _smoothed(units)
    return float(np.sum(whole * (best / whole - 1.0) ** 2))


def _choice_places(parameter: Parameter, values: Sequence[object]) -> npt.NDArray[np.int64]:
    place = {identity(choice): index for index, choice in enumerate(parameter.choices)}
    return np.array([place[identity(value)] for value in values])  # type: ignore[arg-type]


def _counted(places: npt.NDArray[np.int64], size: int) -> Densities:
    counts = np.bincount(places, minlength=size) + PRIOR_WEIGHT / size
    return counts / counts.sum()  # type: ignore[no-any-return]


def _smoothed(units: Densities) -> Densities:
    """A Gaussian kernel density of positions in [0, 1] on the grid, with Scott's bandwidth, summing to 1."""
    grid = np.linspace(0.0, 1.0, GRID_POINTS)
    spread = float(units.std(ddof=1)) if len(units) > 1 else 0.0
    width = max(1.06 * spread * len(units) ** -0.2, 0.5 / (GRID_POINTS - 1))
    # Positions are put on the grid first, so that the cost does not grow with their number.
    places = np.clip(np.rint(units * (GRID_POINTS - 1)).astype(int), 0, GRID_POINTS - 1)
    weights = np.bincount(places, minlength=GRID_POINTS)
    kernels = np.exp(-0.5 * ((grid[:, None] - grid[None, :]) / width) ** 2)
    kernels /= kernels.sum(axis=1, keepdims=True)
    density = weights @ kernels + PRIOR_WEIGHT / GRID_POINTS
    return density / density.sum()  # type: ignore[no-any-return]
