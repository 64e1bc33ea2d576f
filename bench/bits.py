"""[bits] One hash of weights, optimizer and state: for any number of workers, through kills and changes of size."""

import json
import random
from pathlib import Path
from typing import Any

from bench.cluster import Cluster, RacimoJob
from bench.commits import Commit
from bench.harness import Deadline, Goal, Row, quick, row, say
from bench.peers import copy_jobs, scratch
from bench.pinned import pinned
from racimo.spec.errors import RacimoError
from racimo.state.nouns import ENDED

LIMIT_S = 150.0
STEPS = 96
SIZES = (1, 2, 3, 5, 7)
KILLS = 20
RESIZES = 4
PHASES = ("compute", "exchange", "apply")
MOST_EXCHANGE_S = 0.006
"""An exchange of 1 million parameters takes a few milliseconds: kills fall into its first ones."""


def run() -> list[Row]:
    deadline = Deadline(900)
    steps, kills, seeds = (40, 6, 2) if quick() else (STEPS, KILLS, 10)
    sizes = (1, 3) if quick() else SIZES
    with scratch("bits") as folder:
        code = copy_jobs(folder)
        with Cluster(folder, slots=max(SIZES)) as cluster:
            hashes = {size: undisturbed(cluster, code, size, steps) for size in sizes}
            other = undisturbed(cluster, code, 2, steps, seed=1)
            runs = []
            for seed in range(seeds):
                if deadline.left_s <= 0:
                    say(f"  out of time after {seed} of {seeds} seeds")
                    break
                runs.append(disturbed(cluster, code, seed, steps, kills))
    reference = hashes[1]
    same = sum(found["hash"] == reference for found in runs)
    phases = {phase: sum(found["phases"].count(phase) for found in runs) for phase in PHASES}
    return [
        row(
            f"different hashes over {', '.join(map(str, sizes))} workers",
            len(set(hashes.values())),
            "hashes",
            Goal("==", 1),
            peers={"hash": reference},
        ),
        row("another seed gives another hash", int(other != reference), "yes=1", Goal("==", 1)),
        row(f"runs tried with {kills} SIGKILLs and {RESIZES} resizes each", len(runs), "runs", Goal("==", seeds)),
        row("of them with the hash of the undisturbed one-worker run", same, "runs", Goal("==", len(runs))),
        row(
            "SIGKILLs that happened",
            sum(phases.values()),
            "kills",
            Goal("==", kills * len(runs)),
            peers=phases | {"resizes": sum(found["resizes"] for found in runs)},
            note="compute: between backward passes; exchange: in it; apply: between exchange and apply",
        ),
        row("steps missing or applied twice", sum(found["gaps"] for found in runs), "steps", Goal("==", 0)),
        row("micro-shards missing or counted twice", sum(found["shards"] for found in runs), "shards", Goal("==", 0)),
    ]


def undisturbed(cluster: Cluster, code: Path, workers: int, steps: int, seed: int = 0) -> str:
    job = cluster.submit(code, pinned(steps, seed), workers)
    job.wait(LIMIT_S)
    found = job.output("hash.txt")
    say(f"  {workers} workers, seed {seed}: {found[:16]}")
    return found


def disturbed(cluster: Cluster, code: Path, seed: int, steps: int, kills: int) -> dict[str, Any]:
    """The same run on 1 to 4 workers, with seeded kills from within and resizes from outside."""
    random_source = random.Random(seed)
    kill_steps = sorted(random_source.randint(2, steps * 3 // 4) for _ in range(kills))
    schedule = [
        {
            "step": step,
            "phase": random_source.choice(PHASES),
            "rank": random_source.randrange(6),
            "delay_s": random_source.uniform(0, MOST_EXCHANGE_S),
        }
        for step in kill_steps
    ]
    resize_steps = sorted(random_source.sample(range(3, steps - 3), RESIZES))
    job = cluster.submit(code, pinned(steps), "1..4", kills=schedule, name=f"bits-{seed}")
    resizes = 0
    for step in resize_steps:
        job.wait_commits(step, LIMIT_S)
        resizes += resize(cluster, job, random_source.choice(("2", "3", "1..3", "2..4", "1..4")))
    job.wait(LIMIT_S)
    claims = [json.loads(path.read_text()) for path in sorted(job.out.glob("kill-*.json"))]
    commits = job.commits()
    found: dict[str, Any] = {
        "hash": job.output("hash.txt"),
        "phases": [claim["phase"] for claim in claims],
        "resizes": resizes,
        "gaps": gaps(commits, steps),
        "shards": wrong_shards(commits, {claim["step"] for claim in claims}, 8),
    }
    counted = {phase: found["phases"].count(phase) for phase in PHASES}
    say(f"  seed {seed}: {len(claims)} kills {counted}, {resizes} resizes: {found['hash'][:16]}")
    return found


def resize(cluster: Cluster, job: RacimoJob, workers: str) -> bool:
    """False if the run had ended before: it was quicker than we."""
    try:
        return cluster.client.scale(job.id, workers).status not in ENDED
    except RacimoError as error:
        if error.code != "wrong-state":
            raise
        return False


def gaps(commits: list[Commit], steps: int) -> int:
    """Steps that no worker applied, plus steps that one worker applied twice or out of turn."""
    missing = len(set(range(1, steps + 1)) - {commit.step for commit in commits})
    out_of_turn = 0
    newest: dict[str, int] = {}
    for commit in commits:
        before = newest.get(commit.worker)
        out_of_turn += before is not None and commit.step != before + 1
        newest[commit.worker] = commit.step
    return missing + out_of_turn


def wrong_shards(commits: list[Commit], kill_steps: set[int], micro_shards: int) -> int:
    """Micro-shards twice in one step, or in none. What a worker contributed that died before it could write its line is
    missing here though it counted, so a gap is only wrong in a step in which nobody was killed."""
    wrong = 0
    for step in {commit.step for commit in commits}:
        lines = [commit for commit in commits if commit.step == step]
        newest = max(commit.generation for commit in lines)
        shards = [shard for commit in lines if commit.generation == newest for shard in commit.shards]
        wrong += len(shards) - len(set(shards))
        if step not in kill_steps:
            wrong += len(set(range(micro_shards)) - set(shards))
    return wrong
