"""From times to the target, over seeds, to ratios with intervals."""

import math
from collections.abc import Sequence

import numpy as np

NUM_RESAMPLES = 2_000


def median_s(times_s: Sequence[float | None], horizon_s: float) -> float:
    """Over seeds; who did not reach the target counts as having needed the horizon."""
    return float(np.median([horizon_s if one is None else one for one in times_s]))


def reached(times_s: Sequence[float | None]) -> float:
    """The part of the seeds that reached the target."""
    return sum(one is not None for one in times_s) / len(times_s)


def resampled_ratios(
    ours_s: Sequence[float | None], theirs_s: Sequence[float | None], horizon_s: float, seed: int = 0
) -> np.ndarray:
    """Ratios ours / theirs of the medians of `NUM_RESAMPLES` bootstrap samples, each side drawn by itself, sorted."""
    source = np.random.default_rng(seed)

    def medians(times_s: Sequence[float | None]) -> np.ndarray:
        values = np.array([horizon_s if one is None else one for one in times_s])
        drawn: np.ndarray = np.median(values[source.integers(0, len(values), (NUM_RESAMPLES, len(values)))], axis=1)
        return drawn

    found: np.ndarray = np.sort(medians(ours_s) / medians(theirs_s))
    return found


def slower_p(ratios: np.ndarray, than: float) -> float:
    """One-sided: how likely so slow a ratio is if the true one is at most `than`. Never 0, as the sample is finite."""
    return float((np.sum(ratios <= than) + 1) / (len(ratios) + 1))


def interval(ratios: np.ndarray, level: float) -> tuple[float, float]:
    """The middle `level` of the resampled ratios."""
    low, high = np.quantile(ratios, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def holm(p_values: Sequence[float], alpha: float = 0.05) -> list[bool]:
    """Which hypotheses are rejected, so that the chance of any false rejection is at most `alpha` (Holm 1979)."""
    rejected = [False] * len(p_values)
    for position, index in enumerate(sorted(range(len(p_values)), key=lambda one: p_values[one])):
        if p_values[index] > alpha / (len(p_values) - position):
            break
        rejected[index] = True
    return rejected


def geometric_mean(values: Sequence[float]) -> float:
    """`ValueError` without values."""
    if not values:
        raise ValueError("a mean needs values")
    return math.exp(sum(math.log(value) for value in values) / len(values))
