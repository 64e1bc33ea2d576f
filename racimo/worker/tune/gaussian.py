"""A Gaussian process over points and how far they were trained: what a point's value would be at the end, and how sure
that is.

The kernel is a Matern 5/2 over the point, with a length for each axis, times one over the logarithm of the rounds, plus
one over the rounds alone (what training does to all points); as in Swersky et al. 2013 ("Multi-task Bayesian
optimization") and Klein et al. 2020 ("Model-based asynchronous hyperparameter and neural architecture search").
Positions are in the unit cube, progress goes from 0 (one round) to 1 (the last), values are standardised.
"""

import math

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import LinAlgError, cho_solve, cholesky, solve_triangular
from scipy.optimize import minimize
from scipy.special import ndtr

Array = NDArray[np.float64]

_ROOT5 = math.sqrt(5.0)
_JITTER = 1e-8
MEAN_LENGTH = 1.0
"""Of what training does to all points, on the scale of progress."""


class Settings:
    """The kernel's numbers, as logarithms: lengths of the axes, length of progress, variance of points, variance of
    what all share, noise. The prior keeps them where values of standardised problems lie."""

    def __init__(self, num_axes: int) -> None:
        self.num_axes = num_axes
        self.mean = np.array([math.log(0.6)] * num_axes + [0.0, 0.0, math.log(0.5), math.log(0.01)])
        self.spread = np.array([0.8] * num_axes + [0.7, 1.0, 1.0, 1.0])
        low = [math.log(0.05)] * num_axes + [math.log(one) for one in (0.2, 0.05, 1e-3, 1e-5)]
        high = [math.log(8.0)] * num_axes + [math.log(one) for one in (5.0, 20.0, 20.0, 0.3)]
        self.bounds = list(zip(low, high, strict=True))
        self.first = np.array([math.log(0.5)] * num_axes + [0.0, 0.0, math.log(0.5), math.log(0.02)])


def fitted(settings: Settings, points: Array, progress: Array, values: Array, steps: int) -> Array:
    """The kernel's numbers that make these values most likely, by so many steps of L-BFGS from the same beginning."""
    differences = np.ascontiguousarray((points.T[:, :, None] - points.T[:, None, :]) ** 2)
    apart = np.abs(progress[:, None] - progress[None, :])
    found = minimize(
        _loss,
        settings.first,
        args=(settings, differences, apart, values),
        jac=True,
        method="L-BFGS-B",
        bounds=settings.bounds,
        options={"maxiter": steps, "maxfun": 2 * steps},
    )
    theta: Array = found.x
    return theta


def _loss(theta: Array, settings: Settings, differences: Array, apart: Array, values: Array) -> tuple[float, Array]:
    """The negative logarithm of the posterior, and its gradient."""
    axes, count = settings.num_axes, len(values)
    squares, (progress_length, scale, shared, noise) = np.exp(2 * theta[:axes]), np.exp(theta[axes:])
    squared = np.tensordot(1.0 / squares, differences, 1)
    distance = np.sqrt(squared)
    decay = np.exp(-_ROOT5 * distance)
    of_points = (1.0 + _ROOT5 * distance + squared * (5.0 / 3.0)) * decay
    steps = apart / progress_length
    step_decay = np.exp(-_ROOT5 * steps)
    of_progress = (1.0 + _ROOT5 * steps + steps * steps * (5.0 / 3.0)) * step_decay
    of_all = matern(apart / MEAN_LENGTH)
    kernel = scale * of_points * of_progress + shared * of_all
    kernel[np.diag_indices(count)] += noise + _JITTER
    try:
        root = cholesky(kernel, lower=True, check_finite=False)
    except LinAlgError:
        return 1e10, np.zeros_like(theta)
    weights = cho_solve((root, True), values, check_finite=False)
    inverse = cho_solve((root, True), np.eye(count), check_finite=False)
    outer = inverse - weights[:, None] * weights[None, :]
    gradient = np.empty_like(theta)
    inner = scale * of_progress * (5.0 / 3.0) * (1.0 + _ROOT5 * distance) * decay * outer
    gradient[:axes] = 0.5 * np.tensordot(differences, inner, 2) / squares
    inner = scale * of_points * (5.0 / 3.0) * steps * steps * (1.0 + _ROOT5 * steps) * step_decay
    gradient[axes] = 0.5 * float((outer * inner).sum())
    gradient[axes + 1] = 0.5 * float((outer * (scale * of_points * of_progress)).sum())
    gradient[axes + 2] = 0.5 * float((outer * (shared * of_all)).sum())
    gradient[axes + 3] = 0.5 * float(noise) * float(np.trace(outer))
    away = (theta - settings.mean) / settings.spread
    loss = 0.5 * float(values @ weights) + float(np.log(np.diag(root)).sum()) + 0.5 * float(away @ away)
    return loss, gradient + away / settings.spread


def matern(distance: Array) -> Array:
    found: Array = (1.0 + _ROOT5 * distance + distance * distance * (5.0 / 3.0)) * np.exp(-_ROOT5 * distance)
    return found


class Surrogate:
    """The process, given what was seen."""

    def __init__(self, theta: Array, num_axes: int, points: Array, progress: Array, values: Array) -> None:
        self._lengths = np.exp(theta[:num_axes])
        self._progress_length, self._scale, self._shared, self._noise = (float(one) for one in np.exp(theta[num_axes:]))
        self._see(points, progress, values)

    def _see(self, points: Array, progress: Array, values: Array) -> None:
        self.points, self.progress, self.values = points, progress, values
        kernel = self._kernel(points, progress)
        kernel[np.diag_indices(len(values))] += self._noise + _JITTER
        self._root = cholesky(kernel, lower=True, check_finite=False)
        self._weights = cho_solve((self._root, True), values, check_finite=False)

    def believe(self, points: Array) -> None:
        """Takes it that these points end as they are expected to, so that the next one is another (Ginsbourger et al.
        2010, "Kriging is well-suited to parallelize optimization")."""
        ends = np.ones(len(points))
        expected, _ = self.at_end(points)
        self._see(
            np.vstack([self.points, points]),
            np.concatenate([self.progress, ends]),
            np.concatenate([self.values, expected]),
        )

    def at_end(self, points: Array) -> tuple[Array, Array]:
        """Expected values of points that are trained to the end, and how sure (standard deviations)."""
        across = self._kernel(points, np.ones(len(points)))
        solved = solve_triangular(self._root, across.T, lower=True, check_finite=False)
        variance = self._scale + self._shared - (solved * solved).sum(axis=0)
        return across @ self._weights, np.sqrt(np.maximum(variance, 1e-10))

    def _kernel(self, points: Array, progress: Array) -> Array:
        """Between these and what was seen."""
        mine, seen = points / self._lengths, self.points / self._lengths
        squared = (mine * mine).sum(axis=1)[:, None] + (seen * seen).sum(axis=1)[None, :] - 2.0 * mine @ seen.T
        distance = np.sqrt(np.maximum(squared, 0.0))
        if len(set(progress.tolist())) == 1:  # candidates are all asked about at the end: one row serves all
            apart = np.abs(progress[:1, None] - self.progress[None, :])
        else:
            apart = np.abs(progress[:, None] - self.progress[None, :])
        found: Array = self._scale * matern(distance) * matern(apart / self._progress_length)
        return found + self._shared * matern(apart / MEAN_LENGTH)


def log_improvement(expected: Array, deviation: Array, best: float) -> Array:
    """The logarithm of the expected improvement below `best`."""
    away = (best - expected) / deviation
    gain = deviation * (away * ndtr(away) + np.exp(-0.5 * away * away) / math.sqrt(2.0 * math.pi))
    found: Array = np.log(np.maximum(gain, 1e-300))
    return found
