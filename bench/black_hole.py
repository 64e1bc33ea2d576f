"""[black-hole] A host's cable is cut, no reset comes: how soon the others commit again, and it too once healed."""

import random
import time

from bench.commits import first_commits, new_step_after_s, step_times_s, wait_for
from bench.harness import Goal, Row, percentile, quick, row, say
from bench.peers import copy_jobs, scratch
from bench.pinned import hosts_pinned
from bench.stage import Host, HostsJob, several, submit

CASES, QUICK_CASES = 20, 2
HOSTS = 3
STEPS = 1_000_000
CUT_S = (4.0, 8.0)
LIMIT_S = 60.0
GOAL_S = 3.0
BACK_WITHIN_S = 10.0
CALM_S = 2.0


def run() -> list[Row]:
    cases = QUICK_CASES if quick() else CASES
    random_source = random.Random(3)
    with scratch("hole") as folder:
        code = copy_jobs(folder)
        with several(folder, HOSTS) as cluster:
            job = submit(cluster, code, hosts_pinned(STEPS), f"1..{HOSTS}")
            job.wait_commits(20, LIMIT_S)
            wait_for(lambda: job.whole(HOSTS), LIMIT_S, "a worker on every host")
            hosts = list(cluster.hosts)
            order = [hosts[number % HOSTS] for number in range(cases)]
            random_source.shuffle(order)
            found = [case(job, host, random_source) for host in order]
            job.stop()
    next_s, back_s, limits_s = zip(*found, strict=True)
    in_time = sum(value <= limit for value, limit in zip(next_s, limits_s, strict=True))
    return [
        row("cases tried, each host in turn (the head too)", cases, "cases", Goal(">=", cases)),
        row("of them with a next step within 3 s plus one median step", in_time, "cases", Goal("==", cases)),
        row("cable cut to next committed step", list(next_s), "s", note="a step that nobody had committed before"),
        row("cable cut to next committed step, worst", max(next_s), "s"),
        row("cases in which the host was used again within 10 s of healing", sum(v <= BACK_WITHIN_S for v in back_s),
            "cases", Goal("==", cases)),
        row("healed to contributions of all hosts", list(back_s), "s"),
        row("healed to contributions of all hosts, worst", max(back_s), "s"),
    ]  # fmt: skip


def case(job: HostsJob, host: Host, random_source: random.Random) -> tuple[float, float, float]:
    """(cut to next step, healed to the host's next contribution, what the first may take), seconds."""
    wait_for(lambda: job.whole(HOSTS), LIMIT_S, "a worker on every host")
    time.sleep(CALM_S + random_source.uniform(0, 1))
    step_s = percentile(step_times_s(job.commits())[-50:], 50)
    cut_s = time.monotonic()
    host.cut()
    others = [other for other in list(job.cluster.hosts) if other is not host]

    def next_step() -> float | None:
        """Of the others, or of the host alone (then they wait for it): a step that is new."""
        return new_step_after_s(job.commits(), cut_s + in_flight_s(job, cut_s))

    wait_for(lambda: next_step() is not None, LIMIT_S, f"a next step without {host.name}")
    seconds = (next_step() or 0.0) + in_flight_s(job, cut_s)
    time.sleep(max(0.0, random_source.uniform(*CUT_S) - seconds))
    who = "others" if any(c.t > cut_s + 1 for other in others for c in job.commits(other)) else "the host itself"
    healed_s = time.monotonic()
    host.heal()

    def all_contributed() -> float | None:
        """When every host had contributed after healing: whichever side went on alone, the other is back then."""
        firsts = []
        for one in (host, *others):
            later = [commit.t for commit in job.commits(one) if commit.t > healed_s and commit.shards]
            if not later:
                return None
            firsts.append(min(later))
        return max(firsts)

    wait_for(lambda: all_contributed() is not None, LIMIT_S, "contributions of all hosts")
    back_s = (all_contributed() or 0.0) - healed_s
    say(f"  {host.name} cut: next step after {seconds:.2f} s (by {who}); healed: used after {back_s:.2f} s")
    return seconds, back_s, GOAL_S + step_s


def in_flight_s(job: HostsJob, cut_s: float) -> float:
    """A step whose exchange was over when the cable was cut may still be committed right after: it is no answer to the
    cut. It is the one within a tenth of a second, if the next is not."""
    later = sorted(at - cut_s for at in first_commits(job.commits()).values() if at > cut_s)
    if later and later[0] < 0.1 and (len(later) == 1 or later[1] > 0.5):
        return later[0] + 1e-6
    return 0.0
