"""The state as the API shows it: pure functions from state, time and the workers' newest progress to views."""

from collections.abc import Collection, Iterable, Mapping

from msgspec.structs import replace

from racimo.agent.protocol import Progress, UsageReply
from racimo.control.core import Core
from racimo.control.views import NodeView, RunProgress, RunView, StudyProgress, WorkerView
from racimo.spec.home import Home
from racimo.state.fold import State
from racimo.state.nouns import Node, Reason, Run, Worker, parse_worker_id, worker_id
from racimo.state.study import Study

SECONDS_PER_HOUR = 3600.0


def price_of(state: State, node: str) -> float:
    """What a device-hour costs on that node; on one that was forgotten, as much as on the dearest that is known."""
    known = state.nodes.get(node)
    return known.price_per_device_hour if known is not None else highest_price(state)


def highest_price(state: State) -> float:
    return max((node.price_per_device_hour for node in state.nodes.values()), default=0.0)


def device_seconds(run: Run, now_s: float) -> float:
    """Device-seconds used so far: ended workers as measured, live ones from their lease's beginning until now."""
    return run.device_s + sum(_held_s(worker, now_s) for worker in run.live_workers)


def _held_s(worker: Worker, now_s: float) -> float:
    return max(0.0, now_s - worker.started_at_s) * len(worker.devices)


def run_cost(state: State, run: Run, now_s: float) -> float:
    """Each device-second at its own node's price."""
    priceless_s = max(0.0, run.device_s - run.priced_device_s)
    live = sum(_held_s(worker, now_s) * price_of(state, worker.node) for worker in run.live_workers)
    return run.cost + (priceless_s * highest_price(state) + live) / SECONDS_PER_HOUR


def run_progress(state: State, run: Run, workers: Iterable[Progress], now_s: float) -> RunProgress:
    """The run as a whole: the worker that is furthest speaks for all. While it runs, of those that live."""
    live = {worker_id(run.id, worker.attempt, worker.index) for worker in run.live_workers}
    own = sorted(workers, key=lambda one: parse_worker_id(one.worker))
    own = [one for one in own if one.worker in live] or own
    first = max(own, key=lambda progress: (progress.step, progress.loss is not None), default=None)
    common = {"run": run.id, "status": run.status, "num_workers": len(run.live_workers)}
    if first is None:
        return RunProgress(
            **common,  # type: ignore[arg-type]
            cost=run_cost(state, run, now_s),
            generation=run.generation.number if run.generation else 0,
        )
    left = max(0, first.until - first.step)
    return RunProgress(
        **common,  # type: ignore[arg-type]
        step=first.step,
        until=first.until,
        loss=first.loss,
        step_s=first.step_s,
        samples_per_s=first.samples_per_s,
        tokens_per_s=first.tokens_per_s,
        remaining_s=left * first.step_s if first.step_s is not None and first.until else None,
        cost=run_cost(state, run, now_s),
        generation=run.generation.number if run.generation else 0,
        workers=tuple(own),
    )


def worker_view(run: Run, worker: Worker) -> WorkerView:
    rank: int | None = worker.rank
    if run.generation is not None:
        # Who has finished keeps the rank that it had; who died or was sent away has none any more: another may have it.
        finished = (w.index for w in run.workers.values() if w.exit is not None and w.exit.outcome == "finished")
        ranked = sorted({*run.generation.members, *finished})
        rank = ranked.index(worker.index) if worker.index in ranked else None
    return WorkerView(
        id=worker_id(run.id, worker.attempt, worker.index),
        index=worker.index,
        rank=rank,
        node=worker.node,
        devices=worker.devices,
        status=worker.status,
        pid=worker.pid,
        exit=worker.exit,
    )


def run_view(core: Core, run: Run, home: Home, progress: RunProgress | None, with_workers: bool, here: str) -> RunView:
    """`here`: this machine's node. The output folder is named where the run has one on this machine."""
    now_s = core.clock.now_s()
    cost = run_cost(core.state, run, now_s)
    began_s = run.started_at_s
    until_s = run.ended_at_s if run.ended_at_s is not None else now_s
    return RunView(
        id=run.id,
        kind=run.spec.kind,
        status=run.status,
        spec=run.spec,
        reason=core.why(run.id),
        failure=run.failure,
        submitted_wall_s=run.submitted_wall_s,
        queued_s=max(0.0, (began_s if began_s is not None else until_s) - run.submitted_at_s),
        running_s=max(0.0, until_s - began_s) if began_s is not None else 0.0,
        attempt=run.attempt,
        retries_used=run.retries_used,
        elastic=run.elastic,
        least=run.least,
        most=run.most,
        num_live_workers=len(run.live_workers),
        generation=run.generation.number if run.generation is not None else 0,
        device_s=device_seconds(run, now_s),
        cost=cost,
        price_known=cost > 0 or highest_price(core.state) > 0,
        workers=tuple(worker_view(run, worker) for worker in run.workers.values()) if with_workers else (),
        progress=progress,
        study=_study_progress(core.state.studies.get(run.id)),
        output_dir=str(home.output_dir(run.id)) if not run.nodes or here in run.nodes else "",
    )


def _study_progress(study: Study | None) -> StudyProgress | None:
    if study is None:
        return None
    metric = study.objectives[0].metric
    return StudyProgress(
        num_begun=len(study.trials) - study.counts.get("waiting", 0),
        most=study.terms.trials,
        metric=metric,
        best=study.best.metrics.get(metric) if study.best is not None else None,
    )


def cluster_sums(state: State, connected: Collection[str]) -> tuple[int, int, int]:
    """(nodes, devices, free devices) of what is up and answers; a node that is being drained has nothing free."""
    up = {node.id: node for node in state.nodes.values() if node.status == "up" and node.id in connected}
    num_leased = dict.fromkeys(up, 0)
    for owner, _ in state.leases:
        if owner in num_leased:
            num_leased[owner] += 1
    num_free = sum(max(0, len(n.devices) - num_leased[n.id]) for n in up.values() if not n.draining)
    return len(up), sum(len(node.devices) for node in up.values()), num_free


def node_views(
    state: State, usages: Mapping[str, UsageReply], now_s: float, absent: Collection[str] = ()
) -> list[NodeView]:
    """`usages`: what those agents say that answer. `absent`: nodes that this control process has not heard of yet."""
    leases: dict[str, dict[int, str]] = {}
    for (owner, device), worker in state.leases.items():
        leases.setdefault(owner, {})[device] = worker
    nodes = [_away(node) if node.id in absent else node for node in state.nodes.values()]
    return [_node_view(node, leases.get(node.id, {}), usages.get(node.id), now_s) for node in nodes]


def _away(node: Node) -> Node:
    """What the journal says of it is of an earlier control process."""
    if node.status != "up":
        return node
    reason = Reason(code="node-away", text=f"{node.id} has not answered since the head started")
    return replace(node, status="silent", reason=reason)


def _node_view(node: Node, leases: dict[int, str], usage: UsageReply | None, now_s: float) -> NodeView:
    return NodeView(
        node=node,
        num_free=len(node.devices) - len(leases),
        leases=leases,
        free_memory_bytes=usage.free_memory_bytes if usage is not None else 0,
        free_disk_bytes=usage.free_disk_bytes if usage is not None else 0,
        processes=usage.processes if usage is not None else (),
        warnings=usage.warnings if usage is not None else ("its agent does not answer",),
        silent_s=max(0.0, now_s - node.silent_at_s) if node.status != "up" and node.silent_at_s else 0.0,
        drain_left_s=None if node.drain_deadline_s is None else max(0.0, node.drain_deadline_s - now_s),
    )
