"""Ending the processes of this machine's home: what `racimo down` does on a head."""

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

from racimo.act import guardian
from racimo.client.discovery import Endpoint, Finder, supervisor_alive
from racimo.client.probing import NobodyThere, ask, nodes_of
from racimo.client.say import Say
from racimo.client.waiting import own_id
from racimo.control.views import DownView
from racimo.spec.errors import RacimoError
from racimo.spec.home import Home

DOWN_LIMIT_S = 90.0
MAX_NAMED = 5


def service_records(home: Home) -> list[guardian.ProcessRecord]:
    """The service processes of this home that live now."""
    try:
        roles = sorted(path.stem for path in home.processes_dir.glob("*.json"))
    except OSError:
        return []
    found = (guardian.read_live(home.root, role) for role in roles)
    return [record for record in found if record is not None]


def down(home: Home, *, say: Say) -> bool:
    """Ends the cluster of `home`; False if it was not up. Returns when its processes are gone.

    Commands and plain scripts are stopped; exact training saves itself and, like the queue, goes on at the next
    `up`."""
    records = service_records(home)
    if not records and not supervisor_alive(home):
        return False
    others: list[str] = []
    try:
        finder = Finder(say, home=home, may_start=False)
        endpoint = finder.find()
        others = [node.id for node in nodes_of(endpoint)] if endpoint is not None else []
        others = [name for name in others if name != own_id(home)]
        reached = endpoint is not None and _ask_shutdown(endpoint, say)
    except RacimoError as error:
        say(f"the control process does not take the request: {error.message}")
        reached = False
    if not reached:
        say("the control process cannot be reached; ending the recorded processes")
        end_services(home)
    left = await_gone(records, DOWN_LIMIT_S)
    if left:
        say(f"ending {', '.join(f'{r.role} (process {r.pid})' for r in left)}, still there after {DOWN_LIMIT_S:.0f} s")
        end_services(home)
        left = await_gone(service_records(home), DOWN_LIMIT_S)
    if left:
        names = ", ".join(f"{record.role} {record.pid}" for record in left)
        raise RacimoError("internal", f"these processes do not end: {names}")
    if others:
        say(f"still joined, waiting for the next racimo up here: {_names(tuple(others), 'machines')}")
        say("racimo down on each of them ends it there too")
    return True


def _ask_shutdown(endpoint: Endpoint, say: Say) -> bool:
    """False if nobody is there to ask."""
    try:
        view = ask(endpoint, "POST", "/v1/shutdown", DownView, timeout_s=DOWN_LIMIT_S)
    except NobodyThere:
        return False
    except RacimoError as error:
        if error.code != "unreachable":
            raise
        return True  # it ended while answering
    if view.stopped:
        say(f"stopping {_names(view.stopped)}")
    if view.kept:
        say(f"kept for the next racimo up: {_names(view.kept)}")
    return True


def _names(names: tuple[str, ...], what: str = "runs") -> str:
    more = f" and {len(names) - MAX_NAMED} more {what}" if len(names) > MAX_NAMED else ""
    return ", ".join(names[:MAX_NAMED]) + more


def await_gone(records: list[guardian.ProcessRecord], limit_s: float) -> list[guardian.ProcessRecord]:
    """Waits for the ends of these processes; those that still live at the limit."""
    deadline_s = time.monotonic() + limit_s
    left = []
    for record in records:
        pidfd = guardian.open_pidfd(record)
        if pidfd is None:
            continue
        try:
            if not select.select([pidfd], [], [], max(0.0, deadline_s - time.monotonic()))[0]:
                left.append(record)
        finally:
            os.close(pidfd)
    return left


def end_services(home: Home) -> None:
    """By recorded pid and start time only. A living supervisor ends the others; without one they are killed here, and
    the mark keeps them from starting each other again meanwhile."""
    supervisor = guardian.read_live(home.root, "supervisor")
    if supervisor is not None:
        signal_process(supervisor, signal.SIGTERM)
        if not await_gone([supervisor], DOWN_LIMIT_S):
            return
    mark = Path(home.processes_dir, guardian.SHUTDOWN_MARK)
    mark.touch(mode=0o600)
    for record in service_records(home):
        signal_process(record, signal.SIGKILL)
    # In a process of its own: it also ends the children of the process it runs in, which may be a user's program.
    program = "import sys; from racimo.act import leftovers; leftovers.end_all(sys.argv[1])"
    subprocess.run([sys.executable, "-P", "-c", program, str(home.root)], check=True, timeout=DOWN_LIMIT_S)
    mark.unlink(missing_ok=True)


def signal_process(record: guardian.ProcessRecord, number: signal.Signals) -> None:
    pidfd = guardian.open_pidfd(record)
    if pidfd is None:
        return
    try:
        signal.pidfd_send_signal(pidfd, number)
    except ProcessLookupError:
        pass  # it ended in this moment
    finally:
        os.close(pidfd)
