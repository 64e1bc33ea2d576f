"""Views as text: pure functions from what the API answers to what a person reads."""

import time
from typing import Any

import msgspec

from racimo.agent.protocol import ProcessUsage
from racimo.control.views import LogLine, NodeView, RunProgress, RunView
from racimo.spec.quantity import format_duration, format_size
from racimo.state.events import Record
from racimo.state.nouns import ENDED, Exit, Failure, Reason

NO_PRICE = "no price per device-hour is set: racimo up --price AMOUNT"
UNKNOWN = "-"
PS_TITLES = ("ID", "KIND", "STATUS", "WORKERS", "STEP", "LOSS", "TIME", "COST", "REASON")
PS_RIGHT = ("WORKERS", "STEP", "LOSS", "TIME", "COST")
PS_OPTIONAL = ("KIND", "WORKERS", "LOSS", "COST")
"""Left out, in this order, where the terminal is narrow."""
PROCESS_TITLES = ("PROCESS", "PID", "RESIDENT", "PRIVATE", "CPU")
NODE_TITLES = ("NODE", "STATE", "HOST", "ADDRESS", "DEVICES", "FREE", "MEMORY FREE", "DISK FREE", "HELD BY", "REASON")
NODE_RIGHT = ("FREE", "MEMORY FREE", "DISK FREE")
NODE_OPTIONAL = ("DISK FREE", "MEMORY FREE", "HOST", "HELD BY", "ADDRESS")
MAX_SHOWN_HOLDERS = 2


def format_money(amount: float) -> str:
    """Cents for dollars, finer for less than a dollar."""
    if amount and amount < 0.0001:
        return "<$0.0001"
    return f"${amount:,.2f}" if amount >= 1 or amount == 0 else f"${amount:.4f}"


def format_number(value: float) -> str:
    """`950`, `12.3k`, `4.5M`."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.1f}{unit}"
    return f"{value:.0f}" if abs(value) >= 10 else f"{value:.1f}"


def format_loss(loss: float | None) -> str:
    return "" if loss is None else f"{loss:.4g}"


def ps_row(view: RunView) -> tuple[str, ...]:
    step, loss = _how_far(view)
    workers = str(view.most) if view.status in ENDED else f"{view.num_live_workers}/{view.most}"
    time_s = view.queued_s if view.status == "queued" else view.running_s
    return (
        view.id,
        view.kind,
        view.status,
        workers,
        step,
        loss,
        format_duration(time_s),
        format_money(view.cost) if view.price_known else UNKNOWN,
        _one_line(ps_reason(view)),
    )


def _how_far(view: RunView) -> tuple[str, str]:
    """(step, loss); of a tune run the trials that have begun, and the best value, named if it is no loss."""
    if view.study is not None:
        best, metric = view.study.best, view.study.metric
        value = "" if best is None else f"{best:.4g}" if metric == "loss" else f"{metric} {best:.4g}"
        return f"{view.study.num_begun}/{view.study.most}", value
    progress = view.progress
    step = ""
    if progress is not None and (progress.step or progress.until):
        step = f"{progress.step}/{progress.until}" if progress.until else str(progress.step)
    return step, format_loss(progress.loss if progress else None)


def ps_reason(view: RunView) -> str:
    if view.failure is not None:
        return f"{view.failure.message} [{view.failure.code}]"
    return view.reason.text if view.reason is not None else ""


def status_words(view: RunView) -> str:
    """`paused: frozen where it was`, the status said once."""
    text = view.reason.text if view.reason is not None else ""
    if text.startswith(view.status):
        return text
    return f"{view.status}: {text}" if text else view.status


def run_page(view: RunView) -> list[str]:
    """All about one run, as `key  value` lines."""
    spec = view.spec
    what = " ".join(spec.command) or f"{spec.kind} {spec.train or spec.tune}"
    lines = [
        f"{view.id}  {view.status}",
        *_pairs(
            what=" ".join((what, *spec.args)),
            why=view.reason.text if view.reason else "",
            submitted=format_wall(view.submitted_wall_s),
            waited=format_duration(view.queued_s),
            ran=format_duration(view.running_s),
            workers=_workers_words(view),
            attempt=_attempt_words(view),
            progress=progress_words(view.progress, with_cost=False) if view.progress else "",
            cost=cost_words(view),
            outputs=view.output_dir,
        ),
    ]
    if view.workers:
        lines += ["", "workers"]
        lines += [f"  {line}" for line in _worker_lines(view)]
    if (failure := whole_failure(view)) is not None:
        lines += ["", *failure_lines(failure)]
    return lines


def _attempt_words(view: RunView) -> str:
    if not view.attempt:
        return ""
    retries = f" ({view.retries_used} of {view.spec.retries} retries used)" if view.spec.retries else ""
    return f"{view.attempt}{retries}"


def cost_words(view: RunView) -> str:
    used = f"{format_duration(view.device_s)} of device time"
    if view.price_known:
        return f"{format_money(view.cost)} for {used}"
    return f"{used}; {NO_PRICE}" if view.device_s else used


def without_cost(row: tuple[str, ...]) -> tuple[str, ...]:
    """A row of `ps` where no price is set."""
    at = PS_TITLES.index("COST")
    return (*row[:at], *row[at + 1 :])


def _workers_words(view: RunView) -> str:
    most = str(view.most) if view.least == view.most else f"{view.least}..{view.most}"
    words = most if view.status in ENDED else f"{view.num_live_workers} of {most}"
    if view.kind == "tune":
        return words
    return f"{words}, elastic, generation {view.generation}" if view.elastic else words


def _worker_lines(view: RunView) -> list[str]:
    lines = []
    for worker in view.workers:
        devices = ", ".join(str(index) for index in worker.devices)
        about = f"pid {worker.pid}" if worker.pid else ""
        if worker.exit is not None:
            about = exit_words(worker.exit)
        rank = f"rank {UNKNOWN if worker.rank is None else worker.rank}"
        parts = (f"{worker.index:<3}", f"{rank:<8}", f"{worker.status:<9}", f"{worker.node}:{devices}", about)
        lines.append("  ".join(parts).rstrip())
    return lines


def exit_words(exit: Exit) -> str:
    words: str = exit.outcome
    if exit.signal is not None:
        words += f" by signal {exit.signal}"
    elif exit.code is not None:
        words += f" with exit code {exit.code}"
    return words + (f": {exit.failure.message}" if exit.failure else "")


def failure_lines(failure: Failure, *, with_traceback: bool = True) -> list[str]:
    """The first failing rank's traceback first, then what it was, the others counted, and what to do."""
    lines = failure.traceback.rstrip("\n").split("\n") if failure.traceback and with_traceback else []
    first = " failed first" if failure.others else ""
    who = f"rank {failure.rank}{first}: " if failure.rank is not None and not _says_who(failure) else ""
    lines.append(f"{who}{failure.message} [{failure.code}]")
    if failure.others:
        noun = "other" if failure.others == 1 else "others"
        lines.append(f"{failure.others} {noun} failed too")
    return lines + [f"  {line}" for line in failure.hint.splitlines()]


def whole_failure(view: RunView) -> Failure | None:
    """The run's failure, with all counted that failed by themselves: the others were being ended when they did. That of
    a run that was lost with its node also says how the next one starts again elsewhere."""
    if view.failure is None:
        return None
    if view.failure.code == "node-lost" and view.status == "lost" and not view.spec.retries:
        again = (
            f"racimo {'train' if view.spec.train else 'run'} --retries 1 ...   # runs again elsewhere in such a case"
        )
        return msgspec.structs.replace(view.failure, hint=f"{view.failure.hint}\n{again}".lstrip())
    own = [w for w in view.workers if w.id != view.failure.worker and w.exit is not None and w.exit.failure is not None]
    num_failed = sum(worker.exit is not None and worker.exit.outcome == "failed" for worker in own)
    return msgspec.structs.replace(view.failure, others=max(view.failure.others, num_failed))


def _says_who(failure: Failure) -> bool:
    return f"rank {failure.rank}" in failure.message or failure.message.startswith("worker ")


def reason_lines(reason: Reason) -> list[str]:
    lines = [f"{reason.text} [{reason.code}]"]
    return lines + [f"  {name.replace('_', ' ')}: {format_count(value)}" for name, value in reason.counts.items()]


def format_count(value: float) -> str:
    return str(int(value)) if value == int(value) else f"{value:g}"


def progress_words(progress: RunProgress, *, with_cost: bool = True, price_known: bool = True) -> str:
    """The live line: step, loss, speed, workers, time left, cost so far."""
    parts = []
    if progress.step or progress.until:
        parts.append(f"step {progress.step}/{progress.until}" if progress.until else f"step {progress.step}")
    if progress.loss is not None:
        parts.append(f"loss {format_loss(progress.loss)}")
    if progress.tokens_per_s:
        parts.append(f"{format_number(progress.tokens_per_s)} tokens/s")
    elif progress.samples_per_s:
        parts.append(f"{format_number(progress.samples_per_s)} samples/s")
    if progress.status not in ENDED:
        parts.append(f"{progress.num_workers} worker" + ("" if progress.num_workers == 1 else "s"))
    if progress.remaining_s is not None and progress.status not in ENDED:
        parts.append(f"{format_duration(progress.remaining_s)} left")
    if with_cost and price_known:
        parts.append(format_money(progress.cost))
    return "  ".join(parts)


def come_back(run: str) -> str:
    return f"racimo: {run} goes on without you\n  come back:  racimo logs -f {run}\n  end it:     racimo stop {run}"


def ended_words(view: RunView) -> list[str]:
    """How a training run ended: status, last step and loss, time, cost."""
    words: list[str] = [view.status]
    progress = view.progress
    if progress is not None and progress.step:
        words.append(f"step {progress.step}/{progress.until}" if progress.until else f"step {progress.step}")
        if progress.loss is not None:
            words.append(f"loss {format_loss(progress.loss)}")
    words.append(f"in {format_duration(view.running_s)}")
    return [*words, format_money(view.cost)] if view.price_known else words


def event_line(record: Record) -> str:
    """`15:04:05  attempt planned  attempt 1, workers 0 1: the queue was empty`."""
    event = record.event
    name = "".join(f" {letter.lower()}" if letter.isupper() else letter for letter in type(event).__name__).strip()
    clock = time.strftime("%H:%M:%S", time.localtime(record.wall_s))
    details = _event_details(event)
    reason = getattr(event, "reason", None)
    text = reason.text if isinstance(reason, Reason) else ""
    failure = getattr(event, "failure", None)
    if failure is not None and text.startswith(failure.message):
        text = text.removeprefix(failure.message).lstrip(" ;")  # said with the details
    return f"{clock}  {name:<20}  {': '.join(part for part in (details, text) if part)}".rstrip()


def _event_details(event: Any) -> str:
    parts = []
    if (attempt := getattr(event, "attempt", 0)) and not hasattr(event, "number"):
        parts.append(f"attempt {attempt}")
    if (index := getattr(event, "index", None)) is not None:
        parts.append(f"worker {index}")
    indices = [placement.index for placement in getattr(event, "placements", [])] or getattr(event, "indices", [])
    if indices:
        parts.append(f"workers {' '.join(str(i) for i in indices)}")
    if (number := getattr(event, "number", None)) is not None:
        parts.append(f"generation {number} of workers {' '.join(str(i) for i in event.members)}")
    if (exit := getattr(event, "exit", None)) is not None:
        parts.append(exit_words(exit))
    if (pid := getattr(event, "pid", None)) is not None:
        parts.append(f"pid {pid}")
    if how := getattr(event, "how", ""):
        parts.append(how)
    if hasattr(event, "least"):
        parts.append(f"workers {event.least}..{event.most}")
    if status := getattr(event, "status", ""):
        parts.append(status)
    failure = getattr(event, "failure", None)
    if failure is not None:
        parts.append(f"{failure.message} [{failure.code}]")
    return ", ".join(parts)


def log_text(line: LogLine, *, with_worker: bool) -> str:
    return f"[{line.worker.rpartition('/')[2]}] {line.text}" if with_worker else line.text


def node_row(view: NodeView) -> tuple[str, ...]:
    node = view.node
    kinds = sorted({device.kind for device in node.devices})
    return (
        node.id,
        node_state(view),
        node.host,
        node.address or UNKNOWN,
        f"{len(node.devices)} {'/'.join(kinds)}".strip(),
        str(view.num_free) if node.status == "up" else UNKNOWN,
        format_size(view.free_memory_bytes) if view.free_memory_bytes else UNKNOWN,
        format_size(view.free_disk_bytes) if view.free_memory_bytes else UNKNOWN,  # a disk may well have 0 B
        _holders(view),
        _one_line(node.reason.text) if node.reason is not None else "",
    )


def node_state(view: NodeView) -> str:
    """`up`, `silent 12s`, `lost`, and for one that gets no new work `draining 9m 50s` or `drained`."""
    node = view.node
    since = f" {format_duration(view.silent_s)}" if view.silent_s else ""
    if node.status != "up" or not node.draining:
        return f"{node.status}{since}"
    if not view.leases:
        return "drained"
    return "draining" if view.drain_left_s is None else f"draining {format_duration(view.drain_left_s)}"


def _holders(view: NodeView) -> str:
    held: dict[str, int] = {}
    for worker in view.leases.values():
        held[worker] = held.get(worker, 0) + 1
    words = [worker if count == 1 else f"{worker} x{count}" for worker, count in held.items()]
    more = len(words) - MAX_SHOWN_HOLDERS
    return ", ".join(words[:MAX_SHOWN_HOLDERS]) + (f" and {more} more" if more > 0 else "")


def process_row(usage: ProcessUsage) -> tuple[str, ...]:
    resident, private = format_size(usage.resident_bytes), format_size(usage.private_bytes)
    return (usage.role, str(usage.pid), resident, private, f"{usage.cpu_s:.1f} s")


def format_wall(wall_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(wall_s))


def _pairs(**values: str) -> list[str]:
    size = max(len(key) for key in values) + 2
    return [f"  {key:<{size}}{value}" for key, value in values.items() if value]


def _one_line(text: str) -> str:
    return " ".join(text.split())
