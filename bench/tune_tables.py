"""[tune-tables] Simulated time to 1 % regret on 46 tasks, with 8 and 64 workers: Racimo, and for each task the best of
the peers, each with its best documented settings.
"""

import random
from collections.abc import Mapping

from bench.harness import Deadline, Goal, Row, quick, row, say
from bench.tables import statistics
from bench.tables.objectives import every_objective
from bench.tables.play import Answer, Order
from bench.tables.players import played
from bench.tune_peers import tune_python

OURS = "racimo-gp"
PEERS = (
    "ray-random",
    "ray-optuna",
    "optuna-hyperband",
    "optuna-asha",
    "syne-asha",
    "syne-bohb",
    "syne-bore",
    "syne-cqr",
)
RANDOM = "random"
SLOW = frozenset({"syne-bore", "syne-cqr"})
"""They fit models anew for each suggestion, which takes seconds for each simulated run: fewer seeds."""
WORKERS = (8, 64)
SEEDS, SLOW_SEEDS, QUICK_SEEDS = 30, 5, 3
LIMIT_S, QUICK_LIMIT_S = 3_600.0, 120.0
SLOWER_THAN = 1.2


def run() -> list[Row]:
    tune_python()
    deadline = Deadline(QUICK_LIMIT_S if quick() else LIMIT_S)
    answers = played(orders(), deadline)
    cases = {key: found for key in every_case() if (found := case(key, answers)) is not None}
    if not cases:
        raise RuntimeError("no task was played to its end")
    rows = [line for workers in WORKERS for line in summary(cases, workers)]
    return rows + [per_task(key, found) for key, found in sorted(cases.items())]


Key = tuple[str, int]
"""Task and workers."""


def every_case() -> list[Key]:
    tasks = every_objective()
    if quick():
        tasks = [tasks[0], tasks[16], tasks[-1]]
    return [(task, workers) for task in tasks for workers in WORKERS]


def num_seeds(system: str) -> int:
    return QUICK_SEEDS if quick() else SLOW_SEEDS if system in SLOW else SEEDS


def orders() -> list[Order]:
    """In a shuffled order, seed by seed, so that a deadline leaves fewer seeds rather than fewer tasks."""
    found = []
    for seed in range(SEEDS):
        some = [
            Order(system=system, objective=task, workers=workers, seed=seed)
            for system in (OURS, RANDOM, *PEERS)
            if seed < num_seeds(system)
            for task, workers in every_case()
        ]
        random.Random(seed).shuffle(some)
        found += some
    return found


class Case:
    """One task with so many workers: times to the target by system and seed."""

    def __init__(self, times_s: Mapping[str, list[float | None]], horizon_s: float) -> None:
        self.times_s, self.horizon_s = times_s, horizon_s
        self.medians = {name: statistics.median_s(times, horizon_s) for name, times in times_s.items()}
        self.best_peer = min((name for name in times_s if name in PEERS), key=lambda name: self.medians[name])
        self.ratios = statistics.resampled_ratios(times_s[OURS], times_s[self.best_peer], horizon_s)

    @property
    def decided(self) -> bool:
        """Whether ours or the best peer reached the target in the median."""
        return min(self.medians[OURS], self.medians[self.best_peer]) < self.horizon_s

    def faster_than(self, name: str) -> float:
        return self.medians[name] / self.medians[OURS]


def case(key: Key, answers: Mapping[Order, Answer]) -> Case | None:
    """None where ours or every peer is missing."""
    task, workers = key
    times_s: dict[str, list[float | None]] = {}
    horizon_s = 0.0
    for system in (OURS, RANDOM, *PEERS):
        orders_ = (Order(system=system, objective=task, workers=workers, seed=seed) for seed in range(SEEDS))
        found = [told for order in orders_ if (told := answers.get(order)) is not None and told.played is not None]
        if found:
            times_s[system] = [one.played.target_s if one.played is not None else None for one in found]
            horizon_s = found[0].horizon_s
    if OURS not in times_s or not set(PEERS) & times_s.keys():
        return None
    return Case(times_s, horizon_s)


def summary(cases: Mapping[Key, Case], workers: int) -> list[Row]:
    mine = {key: found for key, found in cases.items() if key[1] == workers}
    decided = {key: found for key, found in mine.items() if found.decided}
    say(f"  {workers} workers: {len(decided)} of {len(mine)} tasks decided")
    faster = [found.faster_than(found.best_peer) for found in decided.values()]
    slower = significantly_slower(decided)
    losses = {key[0]: round(1 / found.faster_than(found.best_peer), 2) for key, found in decided.items()}
    losses = {task: by for task, by in sorted(losses.items(), key=lambda item: -item[1]) if by > 1}
    with_random = [found.faster_than(RANDOM) for found in decided.values() if RANDOM in found.medians]
    seeds = {name: min(len(found.times_s.get(name, [])) for found in mine.values()) for name in (OURS, RANDOM, *PEERS)}
    note = f"{len(mine) - len(decided)} tasks not counted: neither reached the target in the median"
    return [
        row(
            f"{workers} workers: faster than the best peer of each task, geometric mean",
            statistics.geometric_mean(faster),
            "x",
            Goal(">=", 1.5),
            peers={"seeds": seeds, "against each": against_each(decided)},
            note=note,
        ),
        row(
            f"{workers} workers: faster than random, geometric mean (a lower bound: random often ends at the horizon)",
            statistics.geometric_mean(with_random),
            "x",
            Goal(">=", 3),
        ),
        row(
            f"{workers} workers: tasks where significantly slower than {SLOWER_THAN} x the best peer",
            len(slower),
            "",
            Goal("==", 0),
            peers={"which": slower, "slower in the median at all, by": losses},
        ),
    ]


def against_each(cases: Mapping[Key, Case]) -> dict[str, float]:
    found = {name: [one.faster_than(name) for one in cases.values() if name in one.medians] for name in PEERS}
    return {name: round(statistics.geometric_mean(ratios), 2) for name, ratios in found.items() if ratios}


def significantly_slower(cases: Mapping[Key, Case]) -> list[str]:
    keys = list(cases)
    verdicts = statistics.holm([statistics.slower_p(cases[key].ratios, SLOWER_THAN) for key in keys])
    return [key[0] for key, slower in zip(keys, verdicts, strict=True) if slower]


def per_task(key: Key, found: Case) -> Row:
    low, high = statistics.interval(found.ratios, 0.95)
    times = {
        name: f"{found.medians[name]:.4g} s, target reached in {statistics.reached(found.times_s[name]):.0%}"
        for name in found.times_s
    }
    return row(
        f"{key[0]}, {key[1]} workers: best peer's median time / ours",
        found.faster_than(found.best_peer),
        "x",
        peers={"best": found.best_peer, **times},
        note=f"ours / best peer, 95 % of resamples: {low:.2f} to {high:.2f}; horizon {found.horizon_s:.4g} s"
        + ("" if found.decided else "; neither reached the target"),
    )
