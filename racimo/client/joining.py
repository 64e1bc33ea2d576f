"""Joining this machine to a cluster whose head is another: asked there first, undone here if it cannot be."""

import contextlib
import itertools
import os
import re
import shutil
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from racimo.act import guardian
from racimo.act.versions import minor_of, own_versions, version_problem
from racimo.agent.uplink import own_address
from racimo.client.binding import likely_address, own_addresses, own_addresses_words
from racimo.client.discovery import Endpoint, supervisor_alive
from racimo.client.ending import await_gone, end_services, signal_process
from racimo.client.findings import LOW_DISK_BYTES
from racimo.client.forgetting import forget
from racimo.client.former_head import OWN_HOME, head_set_aside, refuse_busy_head
from racimo.client.interrupts import turn, uninterrupted
from racimo.client.joined_home import forget_cluster, write_joined_home
from racimo.client.probing import ask
from racimo.client.say import Say
from racimo.client.waiting import await_node, own_id, own_node
from racimo.control.private_files import write_private
from racimo.control.views import ClusterView, NodeView
from racimo.spec.config import (
    CarrierKind,
    ClusterConfig,
    ClusterFile,
    JoinConfig,
    LinkState,
    Token,
    join_address,
    parse_address,
    read_config,
    read_join,
)
from racimo.spec.errors import RacimoError
from racimo.spec.home import Home
from racimo.spec.quantity import format_duration, format_size
from racimo.state.nouns import Node

CLOCK_MOST_S = 120.0
"""How far the clocks of a node and its head may be apart; the head has the same rule."""
LINK_WAIT_S = 10.0
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?")


class Wish(msgspec.Struct, frozen=True, kw_only=True):
    """What `racimo join` was told of this machine. `address`: the IP at which other nodes reach it, "" for the one that
    it shows to the head. `name`: its name in the cluster, "" for one made of its host's. `carrier`: None for
    the head's."""

    slots: int | None = None
    price: float = 0.0
    address: str = ""
    name: str = ""
    carrier: CarrierKind | None = None


class Joined(msgspec.Struct, frozen=True):
    cluster: ClusterView
    node: Node


def join(home: Home, address: str, token: Token, wish: Wish, say: Say) -> Joined:
    """Joins the cluster at `address` (`IP[:PORT]`) and returns once its control process has this node. Whatever cannot
    be is found before anything is started; what fails, or is interrupted, leaves nothing behind. Joins of one home, or
    to one head, are one at a time on a machine: the second sees what has become of the first.

    `RacimoError`: `unreachable`, `certificate-mismatch`, `unauthorized`, `version-mismatch`, `clock-off`, `disk-full`,
    `join-refused`, `invalid-request`, `busy`, and what `check_joined_home` raises.
    """
    host, port = parse_address(address)
    head = join_address(host, port)
    _check_wish(wish, head)
    if not token.pin:
        raise RacimoError(
            "unauthorized",
            "this token has no certificate's pin, so a machine elsewhere cannot know whom it speaks to",
            "racimo up --bind IP   # on the head shows the line to paste",
        )
    with turn(f"join {head}", "racimo join", say), turn(f"join in {home.root}", "racimo join", say):
        _refuse_home(home, head, token)
        endpoint = _endpoint(head, token)
        cluster, nodes = _ask_head(endpoint)
        _refuse_machine(home, cluster)
        _refuse_twice(home, head, nodes, wish)
        _tell_of_former(home, nodes, wish, say)
        say(f"the head at {head} welcomes this machine")
        known = own_node(home, nodes) is not None
        with head_set_aside(home, say), _undone_on_failure(home, None if known else endpoint, say):
            _write_home(home, head, token, wish, cluster, endpoint.certificate)
            return _start(home, say)


def start_again(home: Home, say: Say, *, slots: int | None = None, price: float | None = None) -> Joined | None:
    """Starts the agent of a machine that has joined before, such as after a reboot, perhaps with other `slots` or
    another `price`. None: it runs and goes on dialling a head that does not answer yet."""
    from racimo.client.start import finish_earlier_end

    finish_earlier_end(home, say)
    old = read_config(home)
    new = msgspec.structs.replace(
        old, slots=old.slots if slots is None else slots, price=old.price if price is None else price
    )
    if new != old:
        write_private(home.config_file, msgspec.json.encode(new))
        agent = guardian.read_live(home.root, "agent")
        if agent is not None:  # what it runs goes on meanwhile
            signal_process(agent, signal.SIGTERM)
            await_gone([agent], LINK_WAIT_S)
    if not supervisor_alive(home):
        home.link_file.unlink(missing_ok=True)
        guardian.start_supervisor(home.root)
    try:
        return _await(home, None, say, limit_s=LINK_WAIT_S, is_as_asked=lambda node: _has(node, new))
    except RacimoError as error:
        if error.code in ("start-failed", "unreachable") and supervisor_alive(home):
            return None
        raise


def _has(node: Node, config: ClusterConfig) -> bool:
    return node.price_per_device_hour == config.price and config.slots in (None, len(node.devices))


def _check_wish(wish: Wish, head: str) -> None:
    if wish.name and not _NAME.fullmatch(wish.name):
        raise RacimoError("invalid-request", f"a node's name is up to 32 of a-z, 0-9 and -, not {wish.name!r}")
    if wish.address and wish.address not in {address for _, address in own_addresses()}:
        raise RacimoError(
            "invalid-request",
            f"{wish.address} is no address of this machine (the wrong network interface?); it has"
            f" {own_addresses_words()}",
            f"racimo join {head} --token-file - --address {likely_address()}   # or without --address",
        )


def _refuse_home(home: Home, head: str, token: Token) -> None:
    """What this home is already: a head at work, a node of another cluster, or this very node."""
    from racimo.control.home_check import check_joined_home

    refuse_busy_head(home)
    present = read_join(home)
    if present is not None:
        same = home.token_file.exists() and home.token_file.read_text().strip() == str(token)
        if not same:
            words = f"this machine has joined another cluster, that of {present.address} (home {home.root})"
            raise RacimoError("join-refused", words, f"racimo down   # leaves it; or {OWN_HOME}")
        if supervisor_alive(home) and present.address == head:
            words = f"this machine has joined this cluster already (head {head}, home {home.root})"
            link = link_state(home)
            if link is not None and link.state == "refused":
                words = f"this machine has joined the cluster of {head} but is refused: {link.message}"
                raise RacimoError("join-refused", words, link.hint or "racimo down   # leaves the cluster")
            raise RacimoError("join-refused", words, "racimo nodes   # shows it; racimo down leaves the cluster")
    if home.root.exists():
        check_joined_home(home)


def _endpoint(head: str, token: Token) -> Endpoint:
    from racimo.act.tls import fetch_certificate

    certificate = fetch_certificate(head, token.pin)
    return Endpoint(
        address=f"https://{head}", token=token.secret, token_source="what was given", certificate=certificate
    )


def _ask_head(endpoint: Endpoint) -> tuple[ClusterView, list[Node]]:
    """What the head says of itself, once token, versions and clocks have been found to agree."""
    began_s, began_wall_s = time.monotonic(), time.time()
    try:
        cluster = ask(endpoint, "GET", "/v1/cluster", ClusterView)
        took_s = time.monotonic() - began_s
        nodes = [view.node for view in ask(endpoint, "GET", "/v1/nodes", list[NodeView])]
    except RacimoError as error:
        if error.code == "unauthorized":
            raise RacimoError(
                "unauthorized",
                f"the cluster at {endpoint.address} does not accept this token: it is of another cluster, or old",
                "racimo up   # on the head shows the line to paste",
            ) from None
        raise
    if problem := version_problem(cluster.versions, own_versions()):
        raise RacimoError("version-mismatch", problem, _cure_of_versions(cluster.versions))
    ahead_s = began_wall_s + took_s / 2 - cluster.wall_s
    if cluster.wall_s and abs(ahead_s) > CLOCK_MOST_S:
        off = f"{format_duration(abs(ahead_s))} {'ahead of' if ahead_s > 0 else 'behind'}"
        raise RacimoError(
            "clock-off", f"this machine's clock is {off} that of the head", "timedatectl set-ntp true   # on both"
        )
    return cluster, nodes


def _cure_of_versions(head: dict[str, str]) -> str:
    """What to type here for the minor versions of the head: of torch, or of Python and all in it."""
    python, torch = minor_of(head.get("python", "")), f"torch=={minor_of(head.get('torch', ''))}.*"
    if python == minor_of(own_versions()["python"]):
        return f"pip install '{torch}'   # here"
    packages = f"racimo=={head.get('racimo', '')}" + (f" '{torch}'" if "torch" in head else "")
    return f"python{python} -m venv racimo-venv && racimo-venv/bin/pip install {packages}   # here, then join with it"


def _refuse_machine(home: Home, cluster: ClusterView) -> None:
    place = next(path for path in (home.root, *home.root.parents) if path.exists())
    free_bytes = shutil.disk_usage(place).free
    if free_bytes < LOW_DISK_BYTES:
        raise RacimoError(
            "disk-full",
            f"{format_size(free_bytes)} are free at {place}, a node needs {format_size(LOW_DISK_BYTES)} for files and"
            f" environments of the cluster {cluster.id}",
            "make room, or export RACIMO_HOME=DIR on a larger disk",
        )


def _refuse_twice(home: Home, head: str, nodes: list[Node], wish: Wish) -> None:
    """The same machine, or the same name, in the cluster already."""
    own, again = own_node(home, nodes), f"racimo join {head} --token-file -"  # asks for the token
    address = wish.address or own_address(parse_address(head)[0])
    if own is not None and wish.name and own.id != wish.name:
        words = f"this home is node {own.id} of the cluster already, and a node keeps its name"
        raise RacimoError("join-refused", words, f"{again} --name {own.id}")
    for node in nodes:
        if node == own or node.status != "up":
            continue
        if wish.name and node.id == wish.name:
            words = f"the cluster has a node {node.id} already (host {node.host}, {node.address or 'local'})"
            raise RacimoError("join-refused", words, f"{again} --name {_another(wish.name, nodes)}")
        if not wish.name and node.host == socket.gethostname() and node.address == address:
            words = f"this host is in the cluster already, as node {node.id} (host {node.host} at {address})"
            raise RacimoError(
                "join-refused", words, f"{again} --name {_another(node.id, nodes)}   # if a second node here is meant"
            )
    if own is not None and own.status == "up" and not supervisor_alive(home) and own.host != socket.gethostname():
        words = f"node {own.id} is up on host {own.host}: its home {home.root} is in use there"
        hint = f"rm {home.node_dir / 'id'}   # if it is a copy; else export RACIMO_HOME=DIR of this machine alone"
        raise RacimoError("join-refused", words, hint)


def _another(name: str, nodes: list[Node]) -> str:
    """A name like it that no node has."""
    taken = {node.id for node in nodes}
    return next(found for number in itertools.count(2) if (found := f"{name[:28]}-{number}") not in taken)


def _tell_of_former(home: Home, nodes: list[Node], wish: Wish, say: Say) -> None:
    """A machine that was set up anew, or whose home is gone, is a node of another name now; the former one waits."""
    own = own_node(home, nodes)
    for node in nodes:
        same = node != own and node.status != "up" and node.host == socket.gethostname()
        if same and not wish.name and own is None:
            say(f"if this machine was node {node.id} before, type later: racimo nodes forget {node.id} --confirm-dead")


@contextlib.contextmanager
def _undone_on_failure(home: Home, new_at: Endpoint | None, say: Say) -> Iterator[None]:
    """Whatever goes wrong inside, Ctrl-C included: processes are ended and files of this join are gone again. So is the
    node at its head (`new_at`; None: it was known there before), which may have come to know it already."""
    if home.join_file.exists():
        with _as_before_on_failure(home):
            yield
        return
    fresh = not home.root.exists()
    try:
        yield
    except BaseException:
        with uninterrupted():
            if supervisor_alive(home):
                end_services(home)
                if new_at is not None and (name := own_id(home)):
                    forget(new_at, name, say)
            forget_cluster(home)
            if fresh:
                shutil.rmtree(home.root, ignore_errors=True)
        raise


@contextlib.contextmanager
def _as_before_on_failure(home: Home) -> Iterator[None]:
    """Of a machine that had joined before, and goes on as it was if it cannot join as asked now."""
    before = {path: path.read_bytes() for path in (home.join_file, home.cluster_file, home.config_file)}
    was_running = supervisor_alive(home)
    try:
        yield
    except BaseException:
        with uninterrupted():
            for path, content in before.items():
                write_private(path, content)
            if not was_running and supervisor_alive(home):
                end_services(home)
            agent = guardian.read_live(home.root, "agent")
            if agent is not None:
                signal_process(agent, signal.SIGTERM)
        raise


def _write_home(home: Home, head: str, token: Token, wish: Wish, cluster: ClusterView, certificate: bytes) -> None:
    """What a machine that joins anew (its head has moved) is not told again stays as it was."""
    old_join, old = read_join(home) or JoinConfig(address="", cluster=""), read_config(home)
    if old_join.cluster != cluster.id:
        old_join, old = JoinConfig(address="", cluster=""), ClusterConfig()
    write_joined_home(
        home,
        token,
        certificate,
        ClusterConfig(slots=old.slots if wish.slots is None else wish.slots, price=wish.price or old.price),
        ClusterFile(cluster.id, f"https://{head}", cluster.version),
        JoinConfig(
            address=head,
            cluster=cluster.id,
            address_of_this_node=wish.address or old_join.address_of_this_node,
            carrier=wish.carrier or cluster.carrier or "link",
        ),
        name=wish.name,
    )


def _start(home: Home, say: Say) -> Joined:
    if supervisor_alive(home):  # joined before, and the head has moved: its agent starts anew with the new address
        agent = guardian.read_live(home.root, "agent")
        if agent is not None:
            signal_process(agent, signal.SIGTERM)
        return _await(home, None, say)
    pidfd = os.pidfd_open(guardian.start_supervisor(home.root))
    try:
        return _await(home, pidfd, say)
    finally:
        os.close(pidfd)


def _await(
    home: Home,
    pidfd: int | None,
    say: Say,
    *,
    limit_s: float | None = None,
    is_as_asked: Callable[[Node], bool] = lambda node: True,
) -> Joined:
    """That a node of this name is up is not enough: it may be another machine, with a copy of this home."""
    from racimo.client.discovery import local_endpoint

    cluster = await_node(
        home,
        pidfd,
        say,
        is_as_asked=lambda node: _is_linked(home) and is_as_asked(node),
        look_for_refusal=lambda: _raise_refusal(home),
        limit_s=limit_s,
    )
    endpoint = local_endpoint(home)
    assert endpoint is not None
    node = own_node(home, [view.node for view in ask(endpoint, "GET", "/v1/nodes", list[NodeView])])
    assert node is not None
    # The head names the address of its own machine's clients.
    return Joined(msgspec.structs.replace(cluster, address=endpoint.address), node)


def _raise_refusal(home: Home) -> None:
    """What the head told the agent, if it does not take it."""
    state = link_state(home)
    if state is not None and state.state == "refused":
        raise RacimoError(state.code or "join-refused", state.message, state.hint)


def _is_linked(home: Home) -> bool:
    state = link_state(home)
    return state is not None and state.state == "up"


def link_state(home: Home) -> LinkState | None:
    """How the agent of this machine stands with the head, as it last wrote; None if it has not said anything."""
    try:
        return msgspec.json.decode(Path(home.link_file).read_bytes(), type=LinkState)
    except (FileNotFoundError, msgspec.MsgspecError):
        return None
