"""Starting and ending the cluster of this machine: what `racimo up` and `racimo down` do."""

import os
import secrets
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec

from racimo.act import guardian
from racimo.client.discovery import Endpoint, Finder, local_endpoint, supervisor_alive
from racimo.client.say import Say
from racimo.control.views import ClusterView, DownView
from racimo.spec.errors import RacimoError
from racimo.spec.home import Home

START_LIMIT_S = 60.0
DOWN_LIMIT_S = 90.0
MAX_NAMED_RUNS = 5
POLL_S = 0.02
TOO_MANY_STARTS = 4
"""A healthy cluster starts each service once; at the fourth, waiting on would not help."""
PROBE_TIMEOUT_S = 2.0
SAY_AFTER_S = 1.0
SHOWN_LOG_LINES = 15
SHOWN_LOG_BYTES = 20_000
MAX_SLOTS = 4096


class ClusterConfig(msgspec.Struct, frozen=True, omit_defaults=True):
    """`config.json`. `slots` None: as many as the machine has cores. `price` per device-hour."""

    slots: int | None = None
    price: float = 0.0


class Started(msgspec.Struct, frozen=True):
    """`fresh` is False if the cluster was up already."""

    cluster: ClusterView
    fresh: bool


def up(home: Home, *, slots: int | None = None, price: float | None = None, say: Say) -> Started:
    """Starts the cluster of `home` and returns once it takes runs; if it is up already, says what it is. A
    new price takes effect at once, other slots at the next start.

    Raises `start-failed` with the last lines of the log, and what `check_home` raises for a home that cannot be used.
    """
    if slots is not None and not 1 <= slots <= MAX_SLOTS:
        raise RacimoError("invalid-request", f"--slots is a count from 1 to {MAX_SLOTS}, not {slots}")
    if price is not None and not 0 <= price < 1e6:
        raise RacimoError("invalid-request", f"--price is an amount per device-hour from 0 up, not {price}")
    _finish_earlier_end(home, say)
    if supervisor_alive(home):
        cluster = _await_cluster(home, None, say)
        _refuse_other_slots(home, slots, cluster.num_devices)
        return Started(_take_price(home, price, cluster, say), fresh=False)
    _prepare_home(home)
    _write_config(home, slots, price)
    return Started(_start_and_await(home, say), fresh=True)


def _finish_earlier_end(home: Home, say: Say) -> None:
    """A `down` that is still under way is waited for; one that was cut short is completed."""
    if not Path(home.processes_dir, guardian.SHUTDOWN_MARK).exists():
        return
    supervisor = guardian.read_live(home.root, "supervisor")
    if supervisor is not None:
        say("waiting for the earlier cluster of this home to end")
        _await_gone([supervisor], DOWN_LIMIT_S)
    else:
        _end_services(home)


def _prepare_home(home: Home) -> None:
    from racimo.control.home_check import check_home

    check_home(home)
    try:
        for folder in (home.root, home.service_logs_dir, home.processes_dir):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not home.token_file.exists():
            _write_private(home.token_file, secrets.token_urlsafe(32).encode())
    except OSError as error:
        raise RacimoError("start-failed", f"cannot write in {home.root}: {error.strerror}") from None


def read_config(home: Home) -> ClusterConfig:
    try:
        return msgspec.json.decode(home.config_file.read_bytes(), type=ClusterConfig)
    except FileNotFoundError:
        return ClusterConfig()
    except msgspec.MsgspecError as error:
        raise RacimoError("start-failed", f"{home.config_file} is not as written: {error}") from None


def _write_config(home: Home, slots: int | None, price: float | None) -> None:
    old = read_config(home)
    new = ClusterConfig(old.slots if slots is None else slots, old.price if price is None else price)
    _write_private(home.config_file, msgspec.json.encode(new))


def _refuse_other_slots(home: Home, slots: int | None, num_devices: int) -> None:
    have = read_config(home).slots
    if slots is not None and slots != have:
        found = f"{have} slots" if have is not None else f"the default of {num_devices} slots"
        raise RacimoError(
            "wrong-state",
            f"the cluster is up already with {found}, not {slots}",
            f"racimo down && racimo up --slots {slots}",
        )


def _take_price(home: Home, price: float | None, cluster: ClusterView, say: Say) -> ClusterView:
    """The price is a property of the node, so its agent starts anew with it; what runs there goes on meanwhile."""
    if price is None or price == read_config(home).price:
        return cluster
    _write_config(home, None, price)
    agent = guardian.read_live(home.root, "agent")
    if agent is not None:
        _signal(agent, signal.SIGTERM)
    return _await_cluster(home, None, say, price=price)


def _write_private(path: Path, content: bytes) -> None:
    """Atomically, readable by its owner alone from the first moment."""
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


def _start_and_await(home: Home, say: Say) -> ClusterView:
    """Starts the supervisor and waits; a start that fails leaves no process behind."""
    pid = guardian.start_supervisor(home.root)
    try:
        return _await_cluster(home, pid, say)
    except BaseException:
        if guardian.read_live(home.root, "supervisor") is not None:
            _end_services(home)
        raise


def _await_cluster(home: Home, started_pid: int | None, say: Say, *, price: float | None = None) -> ClusterView:
    """Until `/v1/cluster` answers with a node joined (that has this `price`). Ends at once if the supervisor just
    started ends, or a service that it starts ends again and again."""
    began_s = time.monotonic()
    said = ""
    starts = _Starts(home)
    pidfd = os.pidfd_open(started_pid) if started_pid is not None else None
    try:
        while True:
            cluster = probe(local_endpoint(home))
            if cluster is not None and cluster.num_devices > 0 and price in (None, cluster.price_per_device_hour):
                return cluster
            waited_s = time.monotonic() - began_s
            waits_for = "the control process" if cluster is None else "the node's agent to join"
            if waited_s > START_LIMIT_S:
                raise _start_failed(home, f"after {START_LIMIT_S:.0f} s still waiting for {waits_for}")
            if failing := starts.failing():
                raise _start_failed(home, f"its {failing} process ends again and again")
            if waited_s > SAY_AFTER_S and said != waits_for:
                said = waits_for
                say(f"waiting for {waits_for}")
            ended = select.select([pidfd] if pidfd is not None else [], [], [], POLL_S)[0]
            if ended and pidfd is not None:
                os.close(pidfd)
                pidfd = None
            if pidfd is None and not supervisor_alive(home):
                # Where another `up` was quicker, ours ends and that one's supervisor lives.
                raise _start_failed(home, "the supervisor has ended")
    finally:
        if pidfd is not None:
            os.close(pidfd)


class _Starts:
    """Counts the processes that played each service role while somebody looked."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self._pids: dict[str, set[int]] = {"control": set(), "agent": set()}

    def failing(self) -> str:
        """The role that has been started too often for a start, or ""."""
        for role, pids in self._pids.items():
            record = guardian.read_live(self._home.root, role)
            if record is not None:
                pids.add(record.pid)
        return next((role for role, pids in self._pids.items() if len(pids) >= TOO_MANY_STARTS), "")


def probe(endpoint: Endpoint | None) -> ClusterView | None:
    """The cluster's own words about itself, or None while nobody answers. Other errors (a wrong token) are raised."""
    if endpoint is None:
        return None
    from racimo.client.light_httpx import httpx
    from racimo.client.session import raise_for_error
    from racimo.version import PROTOCOL_VERSION

    headers = {"Authorization": f"Bearer {endpoint.token}", "Racimo-Protocol": str(PROTOCOL_VERSION)}
    verify = endpoint.address.startswith("https:")
    try:
        with httpx.Client(trust_env=False, transport=httpx.HTTPTransport(verify=verify)) as client:
            answer = client.get(f"{endpoint.address}/v1/cluster", headers=headers, timeout=PROBE_TIMEOUT_S)
    except httpx.TransportError:
        return None
    raise_for_error(answer.status_code, answer.content, endpoint)
    return msgspec.json.decode(answer.content, type=ClusterView)


def _start_failed(home: Home, what: str) -> RacimoError:
    lines = []
    for name in ("supervisor.log", "control.log", "agent.log"):
        tail = last_lines(home.service_logs_dir / name)
        if tail:
            lines += [f"--- {name}", *tail]
    log = "\n".join(lines) or f"(nothing in {home.service_logs_dir})"
    return RacimoError("start-failed", f"the cluster in {home.root} did not start: {what}\n{log}", "racimo check")


def last_lines(path: Path, count: int = SHOWN_LOG_LINES) -> list[str]:
    try:
        with open(path, "rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - SHOWN_LOG_BYTES))
            return file.read().decode(errors="replace").splitlines()[-count:]
    except OSError:
        return []


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
    try:
        finder = Finder(say, home=home, may_start=False)
        endpoint = finder.find()
        reached = endpoint is not None and _ask_shutdown(endpoint, say)
    except RacimoError as error:
        say(f"the control process does not take the request: {error.message}")
        reached = False
    if not reached:
        say("the control process cannot be reached; ending the recorded processes")
        _end_services(home)
    left = _await_gone(records, DOWN_LIMIT_S)
    if left:
        say(f"ending {', '.join(f'{r.role} (process {r.pid})' for r in left)}, still there after {DOWN_LIMIT_S:.0f} s")
        _end_services(home)
        left = _await_gone(service_records(home), DOWN_LIMIT_S)
    if left:
        names = ", ".join(f"{record.role} {record.pid}" for record in left)
        raise RacimoError("internal", f"these processes do not end: {names}")
    return True


def _ask_shutdown(endpoint: Endpoint, say: Say) -> bool:
    from racimo.client.light_httpx import httpx
    from racimo.client.session import raise_for_error
    from racimo.version import PROTOCOL_VERSION

    headers = {"Authorization": f"Bearer {endpoint.token}", "Racimo-Protocol": str(PROTOCOL_VERSION)}
    verify = endpoint.address.startswith("https:")
    try:
        with httpx.Client(trust_env=False, transport=httpx.HTTPTransport(verify=verify)) as client:
            answer = client.post(f"{endpoint.address}/v1/shutdown", headers=headers, timeout=DOWN_LIMIT_S)
    except httpx.ConnectError:
        return False
    except httpx.TransportError:
        return True  # it ended while answering
    raise_for_error(answer.status_code, answer.content, endpoint)
    view = msgspec.json.decode(answer.content, type=DownView)
    if view.stopped:
        say(f"stopping {_names(view.stopped)}")
    if view.kept:
        say(f"kept for the next racimo up: {_names(view.kept)}")
    return True


def _names(runs: tuple[str, ...]) -> str:
    more = f" and {len(runs) - MAX_NAMED_RUNS} more runs" if len(runs) > MAX_NAMED_RUNS else ""
    return ", ".join(runs[:MAX_NAMED_RUNS]) + more


def _await_gone(records: list[guardian.ProcessRecord], limit_s: float) -> list[guardian.ProcessRecord]:
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


def _end_services(home: Home) -> None:
    """By recorded pid and start time only. A living supervisor ends the others; without one they are killed here, and
    the mark keeps them from starting each other again meanwhile."""
    supervisor = guardian.read_live(home.root, "supervisor")
    if supervisor is not None:
        _signal(supervisor, signal.SIGTERM)
        if not _await_gone([supervisor], DOWN_LIMIT_S):
            return
    mark = Path(home.processes_dir, guardian.SHUTDOWN_MARK)
    mark.touch(mode=0o600)
    for record in service_records(home):
        _signal(record, signal.SIGKILL)
    # In a process of its own: it also ends the children of the process it runs in, which may be a user's program.
    program = "import sys; from racimo.act import leftovers; leftovers.end_all(sys.argv[1])"
    subprocess.run([sys.executable, "-P", "-c", program, str(home.root)], check=True, timeout=DOWN_LIMIT_S)
    mark.unlink(missing_ok=True)


def _signal(record: guardian.ProcessRecord, number: signal.Signals) -> None:
    pidfd = guardian.open_pidfd(record)
    if pidfd is None:
        return
    try:
        signal.pidfd_send_signal(pidfd, number)
    except ProcessLookupError:
        pass  # it ended in this moment
    finally:
        os.close(pidfd)
