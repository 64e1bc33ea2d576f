"""[first-step] From submit to the first committed step of the pinned workload with two workers."""

from bench.cluster import Cluster
from bench.commits import wait_for
from bench.harness import Deadline, Goal, Row, alternate, quick, ratios, row
from bench.peers import RayCluster, RayJob, TorchrunJob, copy_jobs, require_peers, scratch
from bench.pinned import pinned

LIMIT_S = 120.0
WORKERS = 2


def run() -> list[Row]:
    require_peers()
    deadline = Deadline()
    workload = pinned(steps=3)
    with scratch("first") as folder:
        code = copy_jobs(folder)
        with Cluster(folder, slots=WORKERS) as cluster:
            cluster.warm_up(code, workload, WORKERS)
            ray = RayCluster(folder, code, cpus=WORKERS)
            try:
                ray.submit(workload, WORKERS).wait(LIMIT_S)  # warm, like ours

                def racimo() -> float:
                    job = cluster.submit(code, workload, WORKERS)
                    job.wait(LIMIT_S)
                    return job.commits()[0].t - job.start_s

                def torchrun() -> float:
                    return first_commit_s(TorchrunJob(folder, code, workload, WORKERS))

                def ray_train() -> float:
                    return first_commit_s(ray.submit(workload, WORKERS))

                cases = {"racimo": racimo, "torchrun": torchrun, "ray train": ray_train}
                measured = alternate(cases, 2 if quick() else 9, deadline)
            finally:
                ray.end()
    ours, torchrun_s, ray_s = (measured[name] for name in ("racimo", "torchrun", "ray train"))
    peers = {"torchrun": torchrun_s, "Ray Train, running Ray, connected driver": ray_s}
    return [
        row("submit to first committed step, 2 workers, p50", ours, "s", Goal("<=", 1.0), peers=peers),
        row("times faster than torchrun", ratios(torchrun_s, ours), "x", Goal(">=", 6)),
        row("times faster than Ray Train", ratios(ray_s, ours), "x", Goal(">=", 20)),
    ]


def first_commit_s(job: TorchrunJob | RayJob) -> float:
    wait_for(lambda: bool(job.commits()), LIMIT_S, "a first step")
    first_s = job.commits()[0].t - job.start_s
    job.wait(LIMIT_S)
    return first_s
