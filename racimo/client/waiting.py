"""Waiting until the services of this machine work, or until it is plain that they will not."""

import select
import time
from collections.abc import Callable
from pathlib import Path

from racimo.act import guardian
from racimo.client.discovery import local_endpoint, supervisor_alive
from racimo.client.probing import nodes_of, probe
from racimo.client.say import Say
from racimo.control.views import ClusterView
from racimo.spec.errors import RacimoError
from racimo.spec.home import Home
from racimo.state.nouns import Node

START_LIMIT_S = 60.0
DOOR_WAIT_S = 10.0
POLL_S = 0.02
TOO_MANY_STARTS = 4
"""A healthy cluster starts each service once; at the fourth, waiting on would not help."""
SAY_AFTER_S = 1.0
SHOWN_LOG_LINES = 15
SHOWN_LOG_BYTES = 20_000


def own_id(home: Home) -> str:
    """The name of this home's node; "" before its agent has been started once."""
    try:
        return Path(home.node_dir, "id").read_text().strip()
    except FileNotFoundError:
        return ""


def own_node(home: Home, nodes: list[Node]) -> Node | None:
    """The node among these that the agent of this home is."""
    own = own_id(home)
    return next((node for node in nodes if node.id == own), None)


def await_node(
    home: Home,
    pidfd: int | None,
    say: Say,
    *,
    is_as_asked: Callable[[Node], bool] = lambda node: True,
    look_for_refusal: Callable[[], None] = lambda: None,
    limit_s: float | None = None,
) -> ClusterView:
    """Until the control process answers and has this machine's own node as asked. Ends at once if the supervisor just
    started (`pidfd`) ends, a service that it starts ends again and again, or `look_for_refusal` raises.

    `RacimoError`: start-failed with the logs' last lines; what the control process answers."""
    limit_s = START_LIMIT_S if limit_s is None else limit_s
    began_s = time.monotonic()
    said = ""
    starts = _Starts(home)
    while True:
        endpoint = local_endpoint(home)
        node = own_node(home, nodes_of(endpoint)) if endpoint is not None else None
        cluster = probe(endpoint)
        if cluster is not None and node is not None and node.status == "up" and is_as_asked(node):
            return cluster
        look_for_refusal()
        waited_s = time.monotonic() - began_s
        waits_for = "the control process" if cluster is None else "the node's agent to join"
        if waited_s > limit_s:
            raise start_failed(home, f"after {limit_s:.0f} s still waiting for {waits_for}")
        if failing := starts.failing():
            raise start_failed(home, f"its {failing} process ends again and again")
        if waited_s > SAY_AFTER_S and said != waits_for:
            said = waits_for
            say(f"waiting for {waits_for}")
        if select.select([pidfd] if pidfd is not None else [], [], [], POLL_S)[0]:
            pidfd = None
        if pidfd is None and not supervisor_alive(home):
            # Where another `up` was quicker, ours ends and that one's supervisor lives.
            raise start_failed(home, "the supervisor has ended")


def await_door(home: Home, bind: str) -> None:
    """Until other machines can reach the control process at `bind` ("": none are to), with the right certificate.

    `RacimoError` start-failed after `DOOR_WAIT_S`."""
    if not bind:
        return
    from racimo.act.tls import fetch_certificate
    from racimo.client.binding import shared_token

    until_s = time.monotonic() + DOOR_WAIT_S
    while True:
        try:
            fetch_certificate(bind, shared_token(home).pin)
            return
        except RacimoError as error:
            if time.monotonic() > until_s:
                raise start_failed(home, f"nobody can join at {bind}: {error.message}") from None
        time.sleep(POLL_S)


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


def start_failed(home: Home, what: str) -> RacimoError:
    """The error with what the services wrote last."""
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
            size_bytes = file.seek(0, 2)
            file.seek(max(0, size_bytes - SHOWN_LOG_BYTES))
            return file.read().decode(errors="replace").splitlines()[-count:]
    except OSError:
        return []
