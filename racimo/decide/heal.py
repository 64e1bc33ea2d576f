"""How a running elastic attempt changes its size: generations, replacements, growth, release."""

from collections import Counter
from collections.abc import Iterable, Sequence

from racimo.decide import exits
from racimo.decide.fit import Ask, Pool, ask_of
from racimo.state.events import GenerationAnnounced, WorkersLeaving, WorkersPlanned
from racimo.state.nouns import Placement, Reason, Run, Worker

FIRST_RESTART_DELAY_S = 0.5
MAX_RESTART_DELAY_S = 30.0


def target(run: Run) -> int:
    """The most workers that the run can use."""
    return run.most if run.micro_shards is None else max(run.least, min(run.most, run.micro_shards))


def staying(run: Run) -> list[Worker]:
    """Live workers that are not asked to leave."""
    return [worker for worker in run.live_workers if not worker.leaving]


def next_generation(run: Run) -> GenerationAnnounced | None:
    """The generation that the run should be in, if it is not the present one.

    Members are all who are ready and stay (or pause together). The first generation waits until every live worker is
    ready and there are at least `least`; later ones go on with whoever is left.
    """
    if not run.elastic or run.status not in ("running", "pausing"):
        return None
    strangers = _strangers(run, run.live_workers)
    members = tuple(
        sorted(
            worker.index
            for worker in run.live_workers
            if worker.status == "ready" and worker.leaving in ("", "pause") and worker not in strangers
        )
    )
    finished = exits.finished(run)
    if run.generation is None:
        waiting = any(worker.status != "ready" for worker in staying(run))
        if run.status == "pausing" or waiting or len(members) + len(finished) < run.least:
            return None
    elif finished:
        members = tuple(index for index in members if index in run.generation.members)
    if not members or (run.generation is not None and run.generation.members == members):
        return None
    return GenerationAnnounced(
        run=run.id, attempt=run.attempt, number=run.next_generation, members=members, reason=_change(run, members)
    )


def release(run: Run, evicted: Sequence[Worker] = ()) -> list[WorkersLeaving]:
    """Lets workers go where there are more than `scale` allows: who has to leave its node first, then the newest."""
    stay = sorted(staying(run), key=lambda worker: (worker in evicted, worker.index))
    extra = stay[target(run) :]
    if not extra or not run.elastic:
        return []
    text = f"from {len(stay)} to {target(run)} workers, as asked: the newest leave"
    reason = Reason(code="scaled-down", text=text, counts={"from": len(stay), "to": target(run)})
    # Who is not ready yet holds nothing and listens to nobody: it ends at once.
    groups = (
        ("release", [w for w in extra if w.status == "ready"]),
        ("abort", [w for w in extra if w.status != "ready"]),
    )
    return [
        WorkersLeaving(
            run=run.id,
            attempt=run.attempt,
            indices=tuple(w.index for w in group),
            how="release" if how == "release" else "abort",
            reason=reason,
        )
        for how, group in groups
        if group
    ]


def refuse(run: Run) -> list[WorkersLeaving]:
    """Sends newcomers away whose arithmetic is not that of the members: the run would not stay exact with them."""
    strangers = [worker for worker in _strangers(run, run.live_workers) if worker.leaving != "abort"]
    if not strangers:
        return []
    theirs, ours = strangers[0].numerics.split(), _numerics(run).split()
    text = (
        f"worker {strangers[0].index} computes with {' '.join(word for word in theirs if word not in ours) or 'less'},"
        f" the members with {' '.join(word for word in ours if word not in theirs) or 'less'}: it cannot join them"
    )
    indices = tuple(worker.index for worker in strangers)
    reason = Reason(code="numerics-class", text=text)
    return [WorkersLeaving(run=run.id, attempt=run.attempt, indices=indices, how="abort", reason=reason)]


def _numerics(run: Run) -> str:
    """The members' class of numerics, "" before there are members."""
    return "" if run.generation is None else run.workers[run.generation.members[0]].numerics


def _strangers(run: Run, workers: Iterable[Worker]) -> list[Worker]:
    ours = _numerics(run)
    return [worker for worker in workers if ours and worker.numerics not in ("", ours)]


def may_grow_at_s(run: Run) -> float | None:
    """From when on this attempt may get more workers (0 for at once); None if never: it is finishing or not elastic.

    Newcomers that die one after the other before they are ready are started less and less often. Once one was refused
    for its numerics no more come: the next would be no different.
    """
    if not run.elastic or exits.finished(run) or _strangers(run, run.workers.values()):
        return None
    last_ready_s = max((worker.ready_at_s for worker in run.workers.values()), default=0.0)
    futile = [
        w for w in exits.dead(run) if not w.ready_at_s and w.exited_at_s > last_ready_s and not exits.lost_with_node(w)
    ]
    if not futile:
        return 0.0
    delay_s = min(FIRST_RESTART_DELAY_S * 2.0 ** min(len(futile) - 1, 16), MAX_RESTART_DELAY_S)
    return futile[-1].exited_at_s + delay_s


def replace_dead(run: Run, pool: Pool) -> WorkersPlanned | None:
    """New workers for members that died, on free devices: the dead ones' own are among them."""
    died = exits.unhealed(run) if run.generation is not None else []
    count = min(len(died), target(run) - len(staying(run)))
    placements = _take(run, pool, count)
    if not placements:
        return None
    text = f"{exits.ending_words(died[0])}: {_plural(placements)} in its place"
    if len(died) > 1:
        text = f"{len(died)} workers died: {_plural(placements)} in their place"
    return _planned(
        run, placements, Reason(code="replaces", text=text, counts={"died": len(died), "new": len(placements)})
    )


def replace_evicted(run: Run, pool: Pool, evicted: Sequence[Worker], count: int) -> WorkersPlanned | None:
    """Up to `count` new workers elsewhere for those who have to leave their node."""
    placements = _take(run, pool, count)
    if not placements:
        return None
    text = f"{evicted[0].node} is being drained: {_plural(placements)} elsewhere, then worker {evicted[0].index} leaves"
    if len(evicted) > 1:
        text = (
            f"{evicted[0].node} is being drained: {_plural(placements)} elsewhere for {len(evicted)} that have to leave"
        )
    counts: dict[str, int | float] = {"leaving": len(evicted), "new": len(placements)}
    return _planned(run, placements, Reason(code="moves", text=text, counts=counts))


def fill_up(run: Run, pool: Pool, size: int, code: str, spare: frozenset[str] = frozenset()) -> WorkersPlanned | None:
    """More workers, up to `size` in all, as far as free devices go; none of the kinds in `spare` if any would do."""
    placements = _take(run, pool, size - len(staying(run)), spare)
    if not placements:
        return None
    now, then = len(staying(run)), len(staying(run)) + len(placements)
    text = f"from {now} to {then} workers: devices are free" + (" and nothing waits" if code == "grows" else "")
    return _planned(
        run, placements, Reason(code=code, text=text, counts={"from": now, "to": then, "most": target(run)})
    )


def _take(run: Run, pool: Pool, count: int, spare: frozenset[str] = frozenset()) -> tuple[Placement, ...]:
    if count <= 0:
        return ()
    ask = ask_of(run, spare)
    beside = _beside(run, pool, ask, count)
    taken = pool.take(ask, pool.choose(ask, count - len(beside)), run.next_index + len(beside))
    return (*beside, *taken)


def _beside(run: Run, pool: Pool, ask: Ask, count: int) -> list[Placement]:
    """New workers on devices that the run has and does not fill, where it shares them among its own."""
    if ask.shares == 1:
        return []
    used = Counter((worker.node, worker.devices) for worker in run.live_workers)
    places = [
        (node, devices) for (node, devices), number in sorted(used.items()) if pool.takes_work(node)
        for _ in range(ask.shares - number)
    ]  # fmt: skip
    return [
        Placement(index=run.next_index + number, node=node, devices=devices)
        for number, (node, devices) in enumerate(places[:count])
    ]


def _planned(run: Run, placements: tuple[Placement, ...], reason: Reason) -> WorkersPlanned:
    return WorkersPlanned(run=run.id, attempt=run.attempt, placements=placements, reason=reason)


def _change(run: Run, members: tuple[int, ...]) -> Reason:
    before = () if run.generation is None else run.generation.members
    gone = [run.workers[index] for index in before if index not in members]
    came = [index for index in members if index not in before]
    counts: dict[str, int | float] = {"members": len(members), "before": len(before), "least": run.least}
    if run.generation is None:
        text = f"all {len(members)} workers are ready" if len(members) > 1 else "its worker is ready"
        if absent := exits.not_started(run):
            text = f"{len(members)} of {len(run.workers)} workers are ready: {_absent_words(absent)}"
        return Reason(code="first-generation", text=text, counts=counts)
    words = [_gone_words(run, worker) for worker in gone]
    words += [f"worker {index} joined" for index in came]
    text = f"{', '.join(words)}: {len(members)} {'goes' if len(members) == 1 else 'go'} on"
    if len(members) < run.least and run.status == "running" and not exits.finished(run):
        text += f", fewer than the {run.least} asked for, until replacements are ready"
    code = "members-changed" if gone and came else "member-lost" if gone else "member-joined"
    return Reason(code=code, text=text, counts=counts)


def _absent_words(absent: list[Worker]) -> str:
    first = absent[0]
    assert first.exit is not None and first.exit.failure is not None
    more = f", and {len(absent) - 1} more" if len(absent) > 1 else ""
    return f"worker {first.index} could not be started on {first.node} ({first.exit.failure.message}){more}"


def _gone_words(run: Run, worker: Worker) -> str:
    if worker in exits.dead(run):
        return exits.ending_words(worker)
    if worker in exits.paused(run):
        return f"worker {worker.index} has saved and left"
    return f"worker {worker.index} {'has finished' if worker in exits.finished(run) else 'leaves'}"


def _plural(placements: tuple[Placement, ...]) -> str:
    return "a new worker" if len(placements) == 1 else f"{len(placements)} new workers"
