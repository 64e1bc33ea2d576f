"""Plays runs in simulated time, in the peers' interpreter: `python -m bench.tables.play` reads one order a line and
answers each with one line. An order that fails is answered with what was raised; it ends nothing else.
"""

import functools
import random
import sys
import time
import traceback
import warnings
from typing import Any

import msgspec
import numpy as np

from bench.tables.clock import MAX_ROUNDS, TARGET_REGRET, Limits, Played, System, play
from bench.tables.objectives import LCBench, Objective, objective_of

HORIZON_TRIALS = 100
HORIZON_GENERATIONS = 3
"""A run ends, without the target, when it has had the time of so many complete trainings, all workers together, and
each worker that of `HORIZON_GENERATIONS`."""
NUM_MEASURED = 200
"""Random configurations over which the time of a complete training is averaged."""


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """`rounds`: the run ends after so many rounds of training in all. `to_target`: it ends when the target is met."""

    system: str
    objective: str
    workers: int
    seed: int
    rounds: int = MAX_ROUNDS
    to_target: bool = True
    options: tuple[tuple[str, Any], ...] = ()


class Answer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    order: Order
    played: Played | None = None
    horizon_s: float = 0.0
    computed_s: float = 0.0
    """Seconds of this machine, for the whole run: what the system's decisions and the tables took."""
    error: str = ""


def system_of(order: Order, objective: Objective) -> System:
    """`ValueError` for an unknown name. Imports what the system needs, and nothing of the others."""
    kind, _, how = order.system.partition("-")
    if kind == "racimo":
        from bench.tables.ours import Racimo

        return Racimo(objective, order.workers, order.seed, **{"proposer": how or "tpe", **dict(order.options)})
    if kind == "random":
        from bench.tables.peers_random import RandomSearch

        return RandomSearch(objective, order.seed)
    if kind == "optuna":
        from bench.tables.peers_optuna import Optuna

        return Optuna(objective, order.seed, how)
    if kind == "ray":
        from bench.tables.peers_ray import Ray

        return Ray(objective, order.seed, how)
    if kind == "syne":
        from bench.tables.peers_syne import SyneTune

        return SyneTune(objective, order.seed, how)
    raise ValueError(f"there is no system {order.system}")


@functools.cache
def full_training_s(name: str) -> float:
    """Seconds that a complete training takes, on average over random configurations (the same for everybody)."""
    objective = objective_of(name)
    source = random.Random(0)
    points = [{one.name: one.at(source.random()) for one in objective.space} for _ in range(NUM_MEASURED)]
    curves = objective.curves(points) if isinstance(objective, LCBench) else [objective.curve(one) for one in points]
    return float(np.mean([sum(curve.seconds) for curve in curves]))


def answer(order: Order) -> Answer:
    objective = objective_of(order.objective)
    random.seed(order.seed)
    np.random.seed(order.seed)  # what some peers draw from
    horizon_s = max(HORIZON_TRIALS / order.workers, HORIZON_GENERATIONS) * full_training_s(order.objective)
    limits = Limits(
        horizon_s=horizon_s if order.rounds == MAX_ROUNDS else float("inf"),
        rounds=order.rounds,
        target=TARGET_REGRET if order.to_target else -float("inf"),
    )
    began_s = time.monotonic()
    played = play(system_of(order, objective), objective, order.workers, limits)
    return Answer(order=order, played=played, horizon_s=horizon_s, computed_s=time.monotonic() - began_s)


def main() -> None:
    warnings.simplefilter("ignore")
    for line in sys.stdin:
        order = msgspec.json.decode(line, type=Order)
        try:
            told = answer(order)
        except Exception as error:  # noqa: BLE001 - of a peer, or ours: told, and counted by who asked
            traceback.print_exc()
            told = Answer(order=order, error=f"{type(error).__name__}: {error}"[:500])
        sys.stdout.write(msgspec.json.encode(told).decode() + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
