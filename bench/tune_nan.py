"""[tune-nan] The six tasks of TaskSet with runs that diverge: the part of all training that went into such runs."""

from bench.harness import Deadline, Goal, Row, quick, row
from bench.tables.objectives import objective_of, taskset_tasks
from bench.tables.play import Order
from bench.tables.players import played
from bench.tune_peers import tune_python

OURS = ("racimo-gp", "racimo-random")
PEERS = ("ray-random", "ray-optuna", "optuna-hyperband", "syne-asha")
WORKERS = 8
ROUNDS = 3_000
"""Of training in all, in each study: sixty complete trainings."""
SEEDS, QUICK_SEEDS = 10, 1
LEAST_PART = 0.05
"""Of a task's configurations diverge."""


def run() -> list[Row]:
    tune_python()
    seeds = QUICK_SEEDS if quick() else SEEDS
    tasks = nan_tasks()[: 2 if quick() else None]
    orders = {
        (system, task): [order(system, task, seed) for seed in range(seeds)]
        for system in (*OURS, *PEERS)
        for task in tasks
    }
    answers = played([one for some in orders.values() for one in some], Deadline(90.0 if quick() else 900.0))
    parts: dict[tuple[str, str], float] = {}
    for key, some in orders.items():
        found = [told.played for one in some if (told := answers.get(one)) is not None and told.played is not None]
        if found:
            parts[key] = sum(one.diverged_rounds for one in found) / sum(one.rounds for one in found)
    rows = [
        row(
            f"{task}: rounds spent on runs that diverged",
            100 * parts[OURS[0], task],
            "%",
            Goal("<=", 10),
            peers={name: round(100 * parts[name, task], 1) for name in (*OURS[1:], *PEERS) if (name, task) in parts},
        )
        for task in tasks
    ]
    worst = max(parts[OURS[0], task] for task in tasks)
    return [
        row("the worst of the six tasks: rounds spent on runs that diverged", 100 * worst, "%", Goal("<=", 10)),
        *rows,
    ]


def nan_tasks() -> list[str]:
    """Six of the twelve; in three others one to three of the 1,000 configurations diverge."""
    names = [f"taskset-{task}" for task in taskset_tasks()]
    return [name for name in names if getattr(objective_of(name), "nan_part", 0.0) >= LEAST_PART]


def order(system: str, task: str, seed: int) -> Order:
    return Order(system=system, objective=task, workers=WORKERS, seed=seed, rounds=ROUNDS, to_target=False)
