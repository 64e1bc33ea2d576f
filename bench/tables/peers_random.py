"""Random search: every trial to its end."""

import random

from bench.tables.clock import Move
from bench.tables.objectives import Objective


class RandomSearch:
    def __init__(self, objective: Objective, seed: int) -> None:
        self._objective, self._random, self._count = objective, random.Random(seed), 0

    def moves(self, idle: list[int]) -> list[Move]:
        found = []
        for worker in idle:
            found.append(Move(worker, self._count, self._draw(), 0))
            self._count += 1
        return found

    def _draw(self) -> dict[str, float | int]:
        return {one.name: one.at(self._random.random()) for one in self._objective.space}

    def report(self, worker: int, trial: int, rounds: int, loss: float, seconds: float) -> bool:
        return rounds < self._objective.rounds
