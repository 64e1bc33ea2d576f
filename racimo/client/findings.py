"""What `racimo check` looks at: one function per subject, each returning what it found and what to do about it."""

import os
import shutil
import stat
import sys
import time
from importlib import metadata
from pathlib import Path

import msgspec

from racimo.client.discovery import Endpoint, Finder, local_endpoint
from racimo.client.ending import service_records
from racimo.client.probing import ask, probe
from racimo.control.roles import roles_of
from racimo.control.views import CheckView, ClusterView, Finding
from racimo.spec.config import LinkState, parse_address, read_config
from racimo.spec.errors import RacimoError
from racimo.spec.home import Home
from racimo.spec.quantity import format_size
from racimo.version import __version__

LOW_DISK_BYTES = 2 * 10**9
LOW_MEMORY_BYTES = 10**9
EARLIEST_WALL_S = 1_700_000_000
CLOCK_SLACK_S = 5.0
JOURNAL_CHECKED_BYTES = 100 * 10**6
CHECK_TIMEOUT_S = 120.0
PEER_PORTS = range(7701, 7800)
"""Where agents serve other agents, with TLS and the cluster's secret."""


def examine(home: Home) -> list[Finding]:
    findings = [*versions(), *machine(home), *home_folder(home), *private_files(home)]
    cluster, answer = control_answer(home)
    findings.append(answer)
    if cluster is not None or service_records(home):
        findings += [*services(home), *link(home), *cluster_words(cluster), *listening(home)]
    return [*findings, *journal(home), *isolation()]


def examine_nodes(home: Home) -> list[Finding]:
    """What the head finds on its nodes and on the ways between them; nothing for a cluster of one machine, or where
    none can be asked (which `examine` says)."""
    endpoint = _endpoint(home)
    if endpoint is None:
        return []
    try:
        cluster = probe(endpoint)
        if cluster is None or not cluster.carrier:
            return []
        return list(ask(endpoint, "GET", "/v1/check", CheckView, timeout_s=CHECK_TIMEOUT_S).findings)
    except RacimoError as error:
        return [Finding(verdict="wrong", about="nodes", found=error.message, cure=error.hint)]


def _endpoint(home: Home) -> Endpoint | None:
    try:
        return Finder(
            lambda text: None, may_start=False, home=None if os.environ.get("RACIMO_ADDRESS") else home
        ).find()
    except RacimoError:
        return None


def versions() -> list[Finding]:
    python = ".".join(str(part) for part in sys.version_info[:3])
    findings = [Finding(verdict="ok", about="versions", found=f"racimo {__version__}, Python {python}")]
    try:
        findings.append(Finding(verdict="ok", about="torch", found=metadata.version("torch")))
    except metadata.PackageNotFoundError:
        cure = f"{sys.executable} -m pip install torch"
        findings.append(Finding(verdict="wrong", about="torch", found="is not installed", cure=cure))
    return findings


def machine(home: Home) -> list[Finding]:
    now_s = time.time()
    findings = []
    if now_s < EARLIEST_WALL_S:
        shown = time.strftime("%Y-%m-%d %H:%M", time.gmtime(now_s))
        findings.append(Finding(verdict="wrong", about="clock", found=f"it shows {shown} UTC", cure="set the clock"))
    place = next(path for path in (home.root, *home.root.parents) if path.exists())
    disk = shutil.disk_usage(place)
    words = f"{format_size(disk.free)} of {format_size(disk.total)} free at {place}"
    if disk.free < LOW_DISK_BYTES:
        cure = "make room, or export RACIMO_HOME=DIR on a larger disk"
        findings.append(Finding(verdict="wrong", about="disk", found=words, cure=cure))
    else:
        findings.append(Finding(verdict="ok", about="disk", found=words))
    free_bytes, total_bytes = memory()
    words = f"{format_size(free_bytes)} of {format_size(total_bytes)} available"
    low = free_bytes < LOW_MEMORY_BYTES
    findings.append(
        Finding(
            verdict="note" if low else "ok",
            about="memory",
            found=words,
            cure="training workers take some 300 MB each with torch; end what is not needed" if low else "",
        )
    )
    return findings


def memory() -> tuple[int, int]:
    """(available, total) bytes of this machine."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) * 1024, int(fields["MemTotal"].split()[0]) * 1024


def home_folder(home: Home) -> list[Finding]:
    if not home.root.exists():
        return [Finding(verdict="ok", about="home", found=f"{home.root} is not there yet; racimo up makes it")]
    from racimo.control.home_check import check_home, check_joined_home

    joined = home.join_file.exists()
    try:
        (check_joined_home if joined else check_home)(home)
    except RacimoError as error:
        return [Finding(verdict="wrong", about="home", found=error.message, cure=error.hint)]
    place = "this machine's alone" if joined else "on a local disk"
    return [Finding(verdict="ok", about="home", found=f"{home.root} is private and {place}")]


def _private(home: Home) -> tuple[Path, ...]:
    return (
        home.token_file, home.secrets_file, home.config_file, home.cluster_file, home.journal_file, home.join_file,
        home.certificate_key_file,
    )  # fmt: skip


def private_files(home: Home) -> list[Finding]:
    """Files that hold secrets, or lead to them, are readable by their owner alone."""
    open_ones = []
    for path in _private(home):
        try:
            mode = path.stat().st_mode
        except (FileNotFoundError, NotADirectoryError):
            continue
        if stat.S_IMODE(mode) & 0o077:
            open_ones.append(path)
    if open_ones:
        names = " ".join(str(path) for path in open_ones)
        return [
            Finding(verdict="wrong", about="private files", found=f"others can read {names}", cure=f"chmod 600 {names}")
        ]
    return [Finding(verdict="ok", about="private files", found="token, secrets and journal are readable by you alone")]


def control_answer(home: Home) -> tuple[ClusterView | None, Finding]:
    if os.environ.get("RACIMO_ADDRESS"):
        found = f"$RACIMO_ADDRESS is set: commands go to {os.environ['RACIMO_ADDRESS']}, not to this machine's cluster"
        return None, Finding(verdict="note", about="cluster", found=found)
    try:
        endpoint = local_endpoint(home)
        cluster = probe(endpoint)
    except RacimoError as error:
        return None, Finding(verdict="wrong", about="cluster", found=error.message, cure=error.hint or "racimo down")
    if cluster is not None and endpoint is not None:
        words = f"answers at {endpoint.address}: {cluster.num_devices} devices, {cluster.num_running} runs"
        if cluster.version != __version__:
            cure = "racimo down && racimo up"
            found = f"runs version {cluster.version}, this is {__version__}"
            return cluster, Finding(verdict="wrong", about="cluster", found=found, cure=cure)
        return cluster, Finding(verdict="ok", about="cluster", found=words)
    if service_records(home):
        cure = f"tail {home.service_logs_dir}/*.log"
        found = "its processes live, but the control process does not answer"
        return None, Finding(verdict="wrong", about="cluster", found=found, cure=cure)
    return None, Finding(verdict="ok", about="cluster", found="none is running here; racimo up starts one")


def services(home: Home) -> list[Finding]:
    live = {record.role: record for record in service_records(home)}
    missing = [role for role in ("supervisor", *roles_of(str(home.root))) if role not in live]
    if missing:
        cure = f"they are started again by themselves; else look at {home.service_logs_dir}"
        return [Finding(verdict="wrong", about="processes", found=f"not there: {', '.join(missing)}", cure=cure)]
    words = ", ".join(f"{role} {live[role].pid}" for role in sorted(live))
    return [Finding(verdict="ok", about="processes", found=words)]


def link(home: Home) -> list[Finding]:
    """How the agent of a machine that joined stands with its head."""
    if not home.join_file.exists():
        return []
    try:
        state = msgspec.json.decode(home.link_file.read_bytes(), type=LinkState)
    except (FileNotFoundError, msgspec.MsgspecError):
        found = "the agent has not spoken to its head yet"
        return [Finding(verdict="wrong", about="link", found=found, cure=f"tail {home.service_logs_dir}/agent.log")]
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(state.since_wall_s))
    if state.state == "up":
        return [Finding(verdict="ok", about="link", found=f"to the head at {state.head} since {since}")]
    what = "is refused by" if state.state == "refused" else "cannot reach"
    found = f"the agent {what} the head at {state.head} since {since}: {state.message} [{state.code}]"
    return [Finding(verdict="wrong", about="link", found=found, cure=state.hint)]


def cluster_words(cluster: ClusterView | None) -> list[Finding]:
    if cluster is None:
        return []
    findings = [Finding(verdict="note", about="cluster says", found=warning) for warning in cluster.warnings]
    ahead_s = cluster.started_wall_s - time.time()
    if ahead_s > CLOCK_SLACK_S:
        found = f"the cluster started {ahead_s:.0f} s in the future: the clock was set back (durations stay right)"
        findings.append(Finding(verdict="note", about="clock", found=found))
    return findings


def listening(home: Home) -> list[Finding]:
    """Ports on which the cluster's processes accept connections; anything but loopback stands open to others."""
    import psutil

    places: dict[str, str] = {}
    for record in service_records(home):
        try:
            connections = psutil.Process(record.pid).net_connections("inet")
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        for connection in connections:
            if connection.status == psutil.CONN_LISTEN:
                places[f"{connection.laddr.ip}:{connection.laddr.port}"] = record.role
    findings = []
    loopback = {place: role for place, role in places.items() if place.startswith(("127.", "::1:"))}
    meant = {place: role for place, role in places.items() if place not in loopback and _is_meant(home, place, role)}
    wide = {place: role for place, role in places.items() if place not in loopback and place not in meant}
    if wide:
        found = f"open to other machines: {_places(wide)}"
        findings.append(Finding(verdict="wrong", about="ports", found=found, cure="racimo down"))
    if meant:
        words = f"open to other machines, as they are to be: {_places(meant)}"
        findings.append(Finding(verdict="ok", about="ports", found=words))
    if not findings:
        words = _places(loopback) or "none"
        findings.append(Finding(verdict="ok", about="ports", found=f"only on loopback: {words}"))
    return findings


def _places(places: dict[str, str]) -> str:
    return ", ".join(f"{place} ({role})" for place, role in places.items())


def _is_meant(home: Home, place: str, role: str) -> bool:
    """Whether a service of ours is to be reached there: the head's one port, an agent's for its peers, all of Ray."""
    address, _, port = place.rpartition(":")
    bind = read_config(home).bind
    if role == "control":
        return bool(bind) and (address, int(port)) == parse_address(bind)
    several = bool(bind) or home.join_file.exists()
    return several and (role.startswith("ray") or (role == "agent" and int(port) in PEER_PORTS))


def journal(home: Home) -> list[Finding]:
    try:
        size_bytes = home.journal_file.stat().st_size
    except (FileNotFoundError, NotADirectoryError):
        return []
    words = f"{format_size(size_bytes)} in {home.journal_file}"
    if size_bytes > JOURNAL_CHECKED_BYTES:
        return [Finding(verdict="ok", about="journal", found=f"{words} (too large to be read through here)")]
    import sqlite3

    try:
        connection = sqlite3.connect(f"file:{home.journal_file}?mode=ro", uri=True, timeout=2.0)
        try:
            verdict = str(connection.execute("PRAGMA quick_check(1)").fetchone()[0])
        finally:
            connection.close()
    except sqlite3.Error as error:
        verdict = str(error)
    if verdict != "ok":
        cure = "racimo down && racimo up   # cuts off what is torn, keeps it aside and says so"
        return [Finding(verdict="wrong", about="journal", found=f"{words}: {verdict}", cure=cure)]
    return [Finding(verdict="ok", about="journal", found=words)]


def isolation() -> list[Finding]:
    found = f"all runs are user {os.geteuid()}'s: whoever holds the token can do what this user can"
    return [Finding(verdict="note", about="roles", found=f"{found} (roles do not isolate)")]
