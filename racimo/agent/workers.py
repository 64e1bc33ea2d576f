"""The workers of a node: which there are, how they start, and how their ends are found out and told."""

import asyncio
import os
import signal
import sys
import time

import msgspec

from racimo.agent import processes
from racimo.agent.blobs import BlobStore
from racimo.agent.entry import REPORTED_FILE, Entry, read_ready
from racimo.agent.exits import BALLAST_FILE, PID_FILE, read_exit, write_exit
from racimo.agent.launch import Reaped
from racimo.agent.launching import read_order, write_order
from racimo.agent.leftovers import REAP_WAIT_S, end_leftovers
from racimo.agent.logs import cap_logs
from racimo.agent.prepaid import Prepaid
from racimo.agent.protocol import StartReply, StartWorker, StopWorker, WorkerOrder
from racimo.agent.pulse import Pulse
from racimo.agent.runs import newest_commit
from racimo.agent.slices import Slices
from racimo.agent.spool import Spool
from racimo.agent.starting import Starter, StartFailed
from racimo.agent.states import Fetch, States
from racimo.agent.stopping import signal_worker, stop_worker, terminate
from racimo.agent.turns import await_turn
from racimo.agent.zygotes import Zygotes
from racimo.spec.errors import RacimoError
from racimo.spec.home import Home
from racimo.state.events import WorkerExited, WorkerStarted
from racimo.state.nouns import Exit, Failure, Node, parse_worker_id

SPOOL_RETRY_S = 1.0
EXEC_GRACE_S = 2.0
"""An `exec` command ends with the worker that it runs beside."""
MAX_LIVE_WORKERS = 400
"""Each takes two file descriptors here, of the usual 1,024."""


class Workers:
    """All workers that this node knows, by name. `fetch_state` gets what a trial has saved from another node."""

    def __init__(self, home: Home, node: Node, spool: Spool, blobs: BlobStore, fetch_state: Fetch) -> None:
        self.entries: dict[str, Entry] = {}
        self.ended = Pulse()
        """Beats when any worker's exit is in the spool."""
        self.started = Pulse()
        self.commits: dict[str, int] = {}
        """Newest step that any worker of a run said it committed."""
        self._home, self._node, self._spool, self._blobs = home, node, spool, blobs
        self._ballast = home.node_dir / BALLAST_FILE
        self.slices = Slices(spool, States(home, node.id, fetch_state))
        self.prepaid = Prepaid(lambda: self._node.host)
        self.zygotes = Zygotes(home, self._on_reaped, self._on_lost)
        self._starter = Starter(home, node, blobs, self.zygotes)
        self.environments = self._starter.environments

    @property
    def live(self) -> list[Entry]:
        return [entry for entry in self.entries.values() if entry.live]

    def of_run(self, run: str) -> list[Entry]:
        return [entry for entry in self.entries.values() if entry.run == run]

    def set_node(self, node: Node) -> None:
        """The node as it is from now on: it has got an address."""
        self._node = node
        self._starter.set_node(node)

    # Finding those of an earlier agent

    def adopt_all(self) -> None:
        """Reads the folders of all workers: live ones are watched again, ends that nobody told are told."""
        numbers = {
            (event.run, event.attempt, event.index): number
            for number, event in self._spool.pending.items()
            if isinstance(event, WorkerExited)
        }
        for path in sorted((self._home.node_dir / "workers").glob("*/*/*/order.json")):
            try:
                order = read_order(path.parent)
            except (OSError, msgspec.DecodeError) as error:
                print(f"agent: cannot read {path}: {error}", file=sys.stderr)
                continue
            entry = Entry(order=order, directory=path.parent)
            self._adopt(entry, numbers.get((entry.run, entry.attempt, entry.index)))

    def _adopt(self, entry: Entry, event_number: int | None) -> None:
        directory = entry.directory
        record = processes.read_process_file(directory / PID_FILE)
        exit = read_exit(directory)
        if (directory / REPORTED_FILE).exists() or event_number is not None:
            entry.exit, entry.event_number, entry.record = exit or Exit(outcome="unknown"), event_number, record
        elif record is not None:
            entry.accepted_s = record.monotonic_s
            entry.ready = read_ready(directory)
            self._watch(entry, record)
            self.prepaid.adopted(entry)
        elif exit is None:
            return  # ordered but never begun: control orders it again
        else:
            self._finish_soon(entry)
        self.entries[entry.name] = entry

    # Starting

    def start(self, message: StartWorker) -> StartReply:
        """Takes an order; it is carried out in the background, once nobody is in its way (`agent.turns`). The same
        order again changes nothing.

        `RacimoError`: `wrong-state` if a newer attempt of the run was here, `busy` beyond the bounds.
        """
        order = message.order
        run, attempt, _ = parse_worker_id(order.worker)
        known = self.entries.get(order.worker)
        if known is not None:
            if not known.live and known.event_number not in self._spool.pending:
                known.start_task = asyncio.create_task(self._tell_again(known), name=f"tell again {known.name}")
            return StartReply()
        for other in self.of_run(run) if not order.exec_of else ():
            if not other.order.exec_of and other.attempt > attempt:
                raise RacimoError("wrong-state", f"{order.worker} cannot start: {other.name} is newer")
        if self._spool.full or len(self.live) >= MAX_LIVE_WORKERS:
            raise RacimoError(
                "busy", f"{len(self.live)} workers and {len(self._spool.pending)} untold events are too many"
            )
        missing = self._blobs.missing(order.files)
        if missing:
            return StartReply(missing=missing)
        entry = Entry(order=order, directory=self._home.worker_dir(order.worker))
        self.entries[order.worker] = entry
        self.prepaid.started(entry)
        entry.start_task = asyncio.create_task(self._start(entry), name=f"start {entry.name}")
        self.started.beat()
        return StartReply()

    async def _start(self, entry: Entry) -> None:
        try:
            write_order(entry.directory, entry.order)
            await await_turn(self.entries, entry, self.ended)
            beside = self.entries.get(entry.order.exec_of)
            forked = await self._starter.launch(entry.order, beside.order if beside else None)
        except (StartFailed, RacimoError, OSError) as error:
            await self._start_failed(entry, error)
            return
        except asyncio.CancelledError:
            await self._never_start(entry)
            return
        except Exception as error:  # noqa: BLE001 - a fault of ours ends this worker with its name, not in silence
            sys.excepthook(type(error), error, error.__traceback__)
            await self._start_failed(entry, OSError(repr(error)))
            return
        record = processes.ProcessRecord(
            pid=forked.pid, start_ticks=forked.start_ticks, boot=processes.boot_id(), monotonic_s=time.monotonic()
        )
        entry.order = msgspec.structs.replace(entry.order, secrets={})
        self._watch(entry, record)
        if entry.wish == "pause":
            stop_worker(entry, StopWorker(worker=entry.name, how="pause"))
        await self._append(WorkerStarted(run=entry.run, attempt=entry.attempt, index=entry.index, pid=forked.pid))

    async def _start_failed(self, entry: Entry, error: StartFailed | RacimoError | OSError) -> None:
        match error:
            case StartFailed():
                failure = error.failure
            case RacimoError():
                failure = Failure(code=error.code, message=error.message, hint=error.hint)
            case OSError():
                failure = failure_of_os_error(error, self._node.host)
        failure = msgspec.structs.replace(failure, rank=entry.order.rank, worker=entry.name)
        await self._fence(entry, Exit(outcome="failed", failure=failure))

    async def _never_start(self, entry: Entry) -> None:
        await self._fence(entry, Exit(outcome="killed", signal=signal.SIGTERM, failure=entry.doom))

    async def _fence(self, entry: Entry, exit: Exit) -> None:
        """Ends a worker that has (perhaps) not begun: a fork that is still under way finds `exit.json` and leaves."""
        try:
            entry.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_exit(entry.directory, exit, self._ballast)
        except OSError as error:
            print(f"agent: cannot record the exit of {entry.name}: {error}", file=sys.stderr)
        record = processes.read_process_file(entry.directory / PID_FILE)
        if record is not None and processes.is_alive(record):
            self._watch(entry, record)
            signal_worker(entry, signal.SIGKILL)
        else:
            await self._report(entry, exit)

    # Watching

    def _watch(self, entry: Entry, record: processes.ProcessRecord) -> None:
        entry.record = record
        entry.pidfd = processes.open_pidfd(record)
        if entry.pidfd is None:
            self._finish_soon(entry)
        else:
            asyncio.get_running_loop().add_reader(entry.pidfd, self._finish_soon, entry)

    def _finish_soon(self, entry: Entry) -> None:
        if entry.pidfd is not None:
            asyncio.get_running_loop().remove_reader(entry.pidfd)
        if entry.finish_task is None or entry.finish_task.done():
            entry.finish_task = asyncio.create_task(self._finish(entry), name=f"finish {entry.name}")

    def _on_reaped(self, reaped: Reaped) -> None:
        entry = self.entries.get(reaped.worker)
        if entry is not None:
            entry.reaped_exit = reaped.exit
            entry.reaped.set()

    def _on_lost(self, workers: frozenset[str]) -> None:
        for name in workers:
            if name in self.entries:
                self.entries[name].reaped.set()

    async def _finish(self, entry: Entry) -> None:
        """The worker's main process has ended."""
        try:
            await self._find_end(entry)
        except Exception as error:  # noqa: BLE001 - a fault of ours must not keep the devices of a dead worker
            sys.excepthook(type(error), error, error.__traceback__)
            failure = Failure(code="internal", message=f"the agent could not find out how it ended: {error!r}")
            await self._report(entry, read_exit(entry.directory) or Exit(outcome="unknown", failure=failure))

    async def _find_end(self, entry: Entry) -> None:
        """Waits for its zygote's word, cleans up, and tells."""
        if read_exit(entry.directory) is None:
            await self.zygotes.settle(REAP_WAIT_S)
        if self.zygotes.is_parent_known(entry.name):
            try:
                async with asyncio.timeout(REAP_WAIT_S):
                    await entry.reaped.wait()
            except TimeoutError:
                print(f"agent: no word from the zygote about {entry.name}", file=sys.stderr)
        claimed = processes.read_process_file(entry.directory / PID_FILE)
        if claimed is not None and entry.record is not None and claimed.pid != entry.record.pid:
            self._close_pidfd(entry)
            if processes.is_alive(claimed):
                # The order had reached two zygotes; the other fork is the worker.
                entry.reaped.clear()
                self._watch_later(entry, claimed)
                return
            entry.record = claimed
        exit = read_exit(entry.directory) or entry.reaped_exit or self._unrecorded_exit(entry)
        if entry.reaped_exit is None and entry.record is not None:
            await asyncio.to_thread(end_leftovers, entry.directory, entry.record.pid)
        self._close_pidfd(entry)
        if entry.doom is not None and exit.outcome == "killed":
            exit = msgspec.structs.replace(exit, failure=entry.doom)
        # A burst that ended between two looks of `watch` may have left far more than a log may take.
        await asyncio.to_thread(_cap_logs, entry)
        await self._report(entry, exit)

    def _watch_later(self, entry: Entry, record: processes.ProcessRecord) -> None:
        entry.finish_task = None
        self._watch(entry, record)

    def _unrecorded_exit(self, entry: Entry) -> Exit:
        """Nobody wrote how it ended: our own child tells its status; else what we did to it; else it is unknown."""
        held_s = time.monotonic() - (entry.record.monotonic_s if entry.record else entry.accepted_s)
        exit = None
        if entry.pidfd is not None:
            try:
                result = os.waitid(os.P_PIDFD, entry.pidfd, os.WEXITED | os.WNOHANG)
            except ChildProcessError:
                result = None
            if result is not None and result.si_code == os.CLD_EXITED:
                code = result.si_status
                exit = Exit(outcome="finished" if code == 0 else "failed", code=code, held_s=held_s)
            elif result is not None:
                exit = Exit(outcome="killed", signal=result.si_status, held_s=held_s)
        if exit is None and entry.killed_by_us:
            exit = Exit(outcome="killed", signal=signal.SIGKILL, held_s=held_s)
        if exit is None:
            message = f"{entry.name} ended on {self._node.host} while nobody was left to see how"
            exit = Exit(outcome="unknown", failure=Failure(code="worker-lost", message=message), held_s=held_s)
        try:
            write_exit(entry.directory, exit, self._ballast)
        except OSError as error:
            print(f"agent: cannot record the exit of {entry.name}: {error}", file=sys.stderr)
        return exit

    def _close_pidfd(self, entry: Entry) -> None:
        if entry.pidfd is not None:
            asyncio.get_running_loop().remove_reader(entry.pidfd)
            try:
                # It is our own child if its zygote died before it: leave no zombie.
                os.waitid(os.P_PIDFD, entry.pidfd, os.WEXITED | os.WNOHANG)
            except ChildProcessError:
                pass  # its zygote reaps it
            os.close(entry.pidfd)
            entry.pidfd = None

    # Telling

    async def _report(self, entry: Entry, exit: Exit) -> None:
        entry.cancel_timers()
        self.prepaid.ended(entry)
        if entry.live:
            exit = msgspec.structs.replace(exit, held_s=_lease_s(entry, exit))
        commits = self.commits.get(entry.run, 0)
        if entry.order.kind == "train":
            commits = max(commits, newest_commit(self._home.node_dir / "workers" / entry.run))
        if entry.order.kind == "tune":
            self.slices.ended(entry)
        event = WorkerExited(run=entry.run, attempt=entry.attempt, index=entry.index, exit=exit, commits=commits)
        entry.event_number = await self._append(event)
        entry.exit = exit
        for beside in self.of_run(entry.run):
            if beside.live and beside.order.exec_of == entry.name:
                terminate(beside, EXEC_GRACE_S)
        try:
            (entry.directory / REPORTED_FILE).touch()
        except OSError as error:
            # The next agent would tell this exit once more, which control ignores.
            print(f"agent: cannot mark {entry.name} as told: {error}", file=sys.stderr)
        for follower in entry.followers:
            follower.beat()
        self.ended.beat()

    async def _tell_again(self, entry: Entry) -> None:
        """Control orders a worker whose exit it had acknowledged: its journal has lost it since."""
        assert entry.exit is not None
        await self._report(entry, entry.exit)

    async def _append(self, event: WorkerStarted | WorkerExited) -> int:
        """Spools an event; on a full disk gives up the ballast, then tries again every second."""
        while True:
            try:
                return self._spool.append(event)
            except OSError as error:
                print(f"agent: the spool does not take an event: {error}", file=sys.stderr)
                if self._ballast.exists():
                    self._ballast.unlink()
                else:
                    await asyncio.sleep(SPOOL_RETRY_S)

    async def bury(self, worker: str) -> None:
        """Makes an order that never came (or was never begun) certain not to run, and tells its end."""
        order = WorkerOrder(worker=worker, kind="command")
        entry = Entry(order=order, directory=self._home.worker_dir(worker))
        self.entries[worker] = entry
        write_order(entry.directory, order)
        await self._never_start(entry)

    def forget(self, run: str) -> None:
        """Drops what is known of an ended run; the files are the caller's."""
        for entry in self.of_run(run):
            del self.entries[entry.name]
        self.commits.pop(run, None)
        self._starter.forget_run(run)

    def end_opaque(self, reason: str) -> None:
        """Ends every worker that is not known to be exact: the lease of this node on it is over. Their exits say
        `node-lost` with `reason`. Doing it twice changes nothing."""
        for entry in self.live:
            if entry.ready is not None or entry.doom is not None:
                continue
            message = f"{entry.name} was ended on {self._node.host}: {reason}"
            entry.doom = Failure(code="node-lost", message=message, rank=entry.order.rank, worker=entry.name)
            stop_worker(entry, StopWorker(worker=entry.name, how="abort"))

    async def settle(self) -> None:
        """Waits until no worker is alive (all exits told)."""
        while self.live:
            await self.ended.wait(SPOOL_RETRY_S)


def _lease_s(entry: Entry, exit: Exit) -> float:
    """Seconds of the lease: the process's own time and what passed between its order and its start."""
    if exit.held_s <= 0 or entry.record is None:
        return time.monotonic() - entry.accepted_s
    return exit.held_s + max(0.0, entry.record.monotonic_s - entry.accepted_s)


def _cap_logs(entry: Entry) -> None:
    try:
        cap_logs(entry.directory)
    except OSError as error:
        print(f"agent: cannot shorten the logs of {entry.name}: {error}", file=sys.stderr)


def failure_of_os_error(error: OSError, host: str) -> Failure:
    """A `Failure` for what the operating system refused while a worker was being started."""
    if error.errno == 28:
        return Failure(code="disk-full", message=f"the disk of {host} is full: {error}", hint="racimo check")
    return Failure(code="internal", message=f"{host} could not start the worker: {error}")
