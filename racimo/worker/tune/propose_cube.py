"""A space as a cube of numbers that a model of real values can learn on.

A point is a *position*: a coordinate in [0, 1) for each parameter, in order, as `Space.at` takes it. What the model
sees of it are *features*: a number's coordinate, a choice's indicators, and the middle where a parameter is inactive.
"""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from racimo.spec.space import Parameter, Scalar, Space, Values, identity

Array = NDArray[np.float64]

MOST_INDICATORS = 32
"""Choices of more values than this are one feature, in the order in which they are written."""
INDICATOR = 0.5**0.5
"""So that two choices are as far apart as the ends of an axis."""
BELOW_ONE = 1.0 - 2.0**-53


class Cube:
    def __init__(self, space: Space) -> None:
        self.space = space
        self._parameters = list(space.parameters.items())
        self._index = {name: index for index, (name, _) in enumerate(self._parameters)}
        self.free = np.array([parameter.num_values != 1 for _, parameter in self._parameters])
        """Parameters that can have more than one value."""
        self.ordered = np.array([parameter.kind != "choice" for _, parameter in self._parameters])
        """Parameters whose values lie nearer to each other or farther."""
        self.num_features = sum(_num_features(parameter) for _, parameter in self._parameters)

    def position_of(self, values: Mapping[str, Scalar]) -> Array:
        found = [
            min(max(parameter.unit_of(values[name]), 0.0), BELOW_ONE) if name in values else 0.5
            for name, parameter in self._parameters
        ]
        return np.array(found)

    def values_at(self, position: Array) -> Values:
        return self.space.at(np.minimum(position, BELOW_ONE).tolist())

    def features(self, positions: Array) -> Array:
        """Of many positions, a row each."""
        active = self._active(positions)
        columns: list[Array] = []
        for index, (_, parameter) in enumerate(self._parameters):
            count, mask = _num_features(parameter), active[:, index]
            if count == 1:
                units = positions[:, index]
                if parameter.kind == "choice":
                    units = (_chosen(parameter, units) + 0.5) / len(parameter.choices)
                columns.append(np.where(mask, units, 0.5)[:, None])
            elif count:
                chosen = _chosen(parameter, positions[:, index])
                columns.append(np.where(mask[:, None], INDICATOR * np.eye(count)[chosen], 0.0))
        return np.hstack(columns) if columns else np.zeros((len(positions), 1))

    def _active(self, positions: Array) -> NDArray[np.bool_]:
        active = np.ones(positions.shape, dtype=bool)
        for index, (_, parameter) in enumerate(self._parameters):
            for other, allowed in parameter.when.items():
                at = self._index[other]
                met = _has_one_of(self._parameters[at][1], positions[:, at], allowed)
                active[:, index] &= active[:, at] & met
        return active


def _num_features(parameter: Parameter) -> int:
    if parameter.num_values == 1:
        return 0
    few = parameter.kind == "choice" and len(parameter.choices) <= MOST_INDICATORS
    return len(parameter.choices) if few and len(parameter.choices) > 2 else 1


def _chosen(parameter: Parameter, units: Array) -> NDArray[np.int64]:
    count = len(parameter.choices)
    return np.minimum((units * count).astype(np.int64), count - 1)


def _has_one_of(parameter: Parameter, units: Array, allowed: tuple[Scalar, ...]) -> NDArray[np.bool_]:
    wanted = {identity(value) for value in allowed}
    if parameter.kind == "choice":
        good = np.array([identity(choice) in wanted for choice in parameter.choices])
        found: NDArray[np.bool_] = good[_chosen(parameter, units)]
        return found
    return np.array([identity(parameter.at(float(unit))) in wanted for unit in units])
