"""[crash] `kill -9` of every kind of process, simulated and for real, with training and plain commands running."""

import itertools
import os
import random
import signal
import time
from pathlib import Path

import msgspec

from bench.cluster import Cluster, RacimoJob
from bench.commits import first_commits, redone_steps, step_times_s, wait_for
from bench.harness import Goal, Row, percentile, quick, row, say
from bench.peers import copy_jobs, scratch
from bench.pinned import pinned
from racimo.sim.checks import Violated
from racimo.sim.world import World
from racimo.spec.run import RunSpec
from racimo.state.nouns import ENDED

LIMIT_S = 60.0
SIMULATED, REAL = 200, 20
VICTIMS = ("control", "agent", "zygote-plain", "zygote-torch", "supervisor", "training worker", "command worker")
SERVICES = VICTIMS[:5]
TRAINERS, SLOTS, STEPS = 2, 3, 100_000
COMMAND_S = 0.8
REPLACED_WITHIN_S = 4.0
CONTROL_DOWN_S = 3.0
COMMAND = """
exec 9>>"$1.lock"; flock -n 9 || { echo double >>"$1"; exit 9; }
echo start >>"$1"; sleep "$2"; echo end >>"$1"
"""
"""Says when it starts and ends, and when two of it live at once."""


class Point(msgspec.Struct, kw_only=True):
    """One real kill: whom, and what became of the command that ran meanwhile."""

    victim: str
    moment_s: float
    repaired_s: float
    status: str
    starts: int
    ends: int
    doubles: int

    @property
    def command_lost(self) -> bool:
        return self.status not in ENDED or self.status == "lost"

    @property
    def command_wrong(self) -> bool:
        """It was not the victim, so it must have run to its end, once."""
        return self.victim != "command worker" and (self.status, self.starts, self.ends) != ("succeeded", 1, 1)


def run() -> list[Row]:
    simulated, real, down = (10, 7, 2) if quick() else (SIMULATED, REAL, 5)
    broken, faults = simulate(simulated)
    with scratch("crash") as folder:
        code = copy_jobs(folder)
        with Cluster(folder, slots=SLOTS) as cluster:
            job = cluster.submit(code, pinned(STEPS), f"1..{TRAINERS}", name="training")
            job.wait_commits(10, LIMIT_S)
            points = [strike(cluster, job, folder, victim, number) for number, victim in plan(real)]
            replaced = [replacement_s(cluster, job, number) for number in range(down)]
            during, longest_s, median_s = control_down(cluster, job)
            commits = job.commits()
            attempts = len(list(job.folder.iterdir()))
            job.stop()
            held = sum(len(node.node.devices) - node.num_free for node in cluster.client.nodes())
            cluster.command("down")
            left = cluster.processes()
    repairs = [one.repaired_s for one in points if one.repaired_s]
    return [
        row(f"simulated histories with a broken promise, of {simulated}", broken, "runs", Goal("==", 0)),
        row("faults in them", sum(faults.values()), "faults", Goal(">=", simulated), peers=faults),
        row("real SIGKILLs", len(points), "kills", Goal("==", real), peers=counted([one.victim for one in points])),
        row("runs lost", sum(one.command_lost for one in points), "runs", Goal("==", 0)),
        row("commands that did not run exactly once", sum(one.command_wrong for one in points), "runs", Goal("==", 0)),
        row("two live attempts of one run", sum(one.doubles for one in points), "times", Goal("==", 0)),
        row("recorded exits repeated", sum(one.starts > 1 for one in points), "times", Goal("==", 0)),
        row("attempts of the training run", attempts, "attempts", Goal("==", 1)),
        row("training steps redone", redone_steps(commits, TRAINERS), "steps", Goal("==", 0)),
        row("SIGKILL of a service until its next process is there", repairs, "s"),
        row("control process and worker killed: to the replacement's first step, worst", max(replaced), "s",
            Goal("<=", REPLACED_WITHIN_S), peers={"all": replaced}),
        row(f"steps committed while the control process was down {CONTROL_DOWN_S:g} s", during, "steps", Goal(">=", 1)),
        row("longest step meanwhile, in median steps", longest_s / median_s, "x"),
        row("devices held at the end", held, "devices", Goal("==", 0)),
        row("processes left after `racimo down`", len(left), "processes", Goal("==", 0),
            peers={str(process.pid): " ".join(process.cmdline()[:6]) for process in left}),
    ]  # fmt: skip


def simulate(count: int) -> tuple[int, dict[str, int]]:
    """(histories that broke a promise, faults by kind). The stories of the broken ones are printed."""
    broken = 0
    faults: dict[str, int] = {}
    for seed in range(1_000, 1_000 + count):
        world = World(seed)
        try:
            world.run()
        except Violated as error:
            broken += 1
            say(f"  seed {seed}: {error}")
        for kind, number in world.fate.num_faults.items():
            faults[kind] = faults.get(kind, 0) + number
    return broken, faults


def plan(count: int) -> list[tuple[int, str]]:
    """Every kind of victim in turn, shuffled, `count` in all."""
    victims = [VICTIMS[number % len(VICTIMS)] for number in range(count)]
    random.Random(11).shuffle(victims)
    return list(enumerate(victims))


def strike(cluster: Cluster, job: RacimoJob, folder: Path, victim: str, number: int) -> Point:
    """Submits a command, kills the victim at a seeded moment, waits for the repair and the command's end."""
    record = folder / f"command-{number}"
    words = ("sh", "-c", COMMAND, "sh", str(record), str(COMMAND_S))
    wait_for(lambda: job.whole(TRAINERS), LIMIT_S, "a whole group")
    view = cluster.client.submit(RunSpec(command=words, files="", name=f"command-{number}"))
    if victim == "command worker":
        wait_for(record.exists, LIMIT_S, "the command's first line")
    time.sleep(random.Random(number).uniform(0, COMMAND_S * 0.8))
    before = cluster.services()
    moment_s = time.monotonic()
    os.kill(pid_of(cluster, job, view.id, victim, number), signal.SIGKILL)
    repaired_s = 0.0
    if victim in SERVICES:
        wait_for(lambda: cluster.services().get(victim) not in (None, before[victim]), LIMIT_S, f"a new {victim}")
        repaired_s = time.monotonic() - moment_s
    view = cluster.client.wait(view.id, timeout_s=LIMIT_S)
    lines = record.read_text().split() if record.exists() else []
    say(f"  kill {number}: {victim}, repaired in {repaired_s:.2f} s, command {view.status}")
    return Point(
        victim=victim,
        moment_s=moment_s,
        repaired_s=repaired_s,
        status=view.status,
        starts=lines.count("start"),
        ends=lines.count("end"),
        doubles=lines.count("double"),
    )


def pid_of(cluster: Cluster, job: RacimoJob, command: str, victim: str, number: int) -> int:
    if victim == "training worker":
        return random.Random(number).choice(job.worker_pids())
    if victim == "command worker":
        found = [worker.pid for worker in cluster.client.run(command).workers if worker.pid]
        assert found and found[0], f"{command} has no process"
        return found[0]
    return cluster.services()[victim]


def replacement_s(cluster: Cluster, job: RacimoJob, number: int) -> float:
    """Seconds from the death of a worker, while the control process is down, to the first step of its replacement."""
    wait_for(lambda: job.whole(TRAINERS), LIMIT_S, "a whole group")
    known = set(job.folder.glob("*/*"))
    os.kill(cluster.services()["control"], signal.SIGKILL)
    moment_s = job.kill_one(random.Random(number))

    def new_commits() -> list[float]:
        return [commit.t for commit in job.commits() if Path(commit.worker) not in known]

    wait_for(lambda: bool(new_commits()), LIMIT_S, "a replacement's first step")
    say(f"  control process and worker killed: replacement's first step after {min(new_commits()) - moment_s:.2f} s")
    return min(new_commits()) - moment_s


def control_down(cluster: Cluster, job: RacimoJob) -> tuple[int, float, float]:
    """(steps committed while there was no control process, longest of them, median step). The supervisor is stopped
    meanwhile, so that it repairs nothing."""
    wait_for(lambda: job.whole(TRAINERS), LIMIT_S, "a whole group")
    services = cluster.services()
    median_s = percentile(step_times_s(job.commits())[-50:], 50)
    os.kill(services["supervisor"], signal.SIGSTOP)
    try:
        os.kill(services["control"], signal.SIGKILL)
        start_s = time.monotonic()
        time.sleep(CONTROL_DOWN_S)
        end_s = time.monotonic()
    finally:
        os.kill(services["supervisor"], signal.SIGCONT)
    moments = [at for at in sorted(first_commits(job.commits()).values()) if start_s < at <= end_s]
    bounds = [start_s, *moments, end_s]
    longest_s = max(after - before for before, after in itertools.pairwise(bounds))
    wait_for(lambda: "control" in cluster.services(), LIMIT_S, "a new control process")
    return len(moments), longest_s, median_s


def counted(names: list[str]) -> dict[str, int]:
    return {name: names.count(name) for name in sorted(set(names))}
