"""Starting the cluster of this machine, and changing what it was started with: what `racimo up` does."""

import os
import secrets
import signal
from pathlib import Path

import msgspec

from racimo.act import guardian
from racimo.client.binding import check_bind, checked_bind, join_line, shared_token
from racimo.client.discovery import local_endpoint, supervisor_alive
from racimo.client.ending import DOWN_LIMIT_S, await_gone, end_services, signal_process
from racimo.client.interrupts import uninterrupted
from racimo.client.joined_home import clear_of_former_cluster
from racimo.client.probing import nodes_of
from racimo.client.say import Say
from racimo.client.waiting import await_door, await_node, own_node
from racimo.control.private_files import write_private
from racimo.control.views import ClusterView
from racimo.spec.config import CarrierKind, ClusterConfig, parse_address, read_config
from racimo.spec.errors import RacimoError
from racimo.spec.home import Home
from racimo.state.nouns import Node

MAX_SLOTS = 4096
DEFAULT_CARRIER: CarrierKind = "ray"
DOOR_LOOK_S = 2.0


class Started(msgspec.Struct, frozen=True):
    """`fresh` is False if the cluster was up already. `join`: what to paste on other machines, "" where none can
    reach this one."""

    cluster: ClusterView
    fresh: bool
    join: str = ""


def up(
    home: Home,
    *,
    slots: int | None = None,
    price: float | None = None,
    bind: str | None = None,
    carrier: CarrierKind | None = None,
    say: Say,
) -> Started:
    """Starts the cluster of `home` and returns once it takes runs; if it is up already, changes what may change while
    it is: the price, and the address at which others reach it (`bind`, `IP[:PORT]`). Work goes on meanwhile.

    Raises `start-failed` with the last lines of the log, and what `check_home` and `check_bind` raise.
    """
    if slots is not None and not 0 <= slots <= MAX_SLOTS:
        raise RacimoError("invalid-request", f"--slots is a count from 0 to {MAX_SLOTS}, not {slots}")
    if price is not None and not 0 <= price < 1e6:
        raise RacimoError("invalid-request", f"--price is an amount per device-hour from 0 up, not {price}")
    if home.join_file.exists():
        raise RacimoError(
            "wrong-state", f"this machine is a node of another's cluster (its home {home.root} has joined)",
            "racimo down   # leaves that cluster; or export RACIMO_HOME=DIR for one of its own",
        )  # fmt: skip
    finish_earlier_end(home, say)
    old = read_config(home)
    new = _config(old, slots, price, bind, carrier)
    if supervisor_alive(home):
        cluster = await_node(home, None, say)
        _refuse_other_slots(old, slots, home)
        if new != old or (bind is not None and not _door_is_open(home, new.bind)):
            cluster = _change(home, old, new, say)
        return Started(cluster, False, join_line(home))
    prepare_home(home)
    if new.bind:
        check_bind(home, new.bind)
    write_private(home.config_file, msgspec.json.encode(new))
    cluster = start_and_await(home, say)
    await_door(home, new.bind)
    return Started(cluster, True, join_line(home))


def _config(
    old: ClusterConfig, slots: int | None, price: float | None, bind: str | None, carrier: CarrierKind | None
) -> ClusterConfig:
    if bind is not None:
        bind = checked_bind(bind)
        carrier = carrier or (old.carrier if old.bind else DEFAULT_CARRIER)
    elif carrier is not None and not old.bind:
        raise RacimoError("invalid-request", "--carrier is for a cluster of several machines", "racimo up --bind IP")
    return ClusterConfig(
        slots=old.slots if slots is None else slots,
        price=old.price if price is None else price,
        bind=old.bind if bind is None else bind,
        carrier=old.carrier if carrier is None else carrier,
    )


def finish_earlier_end(home: Home, say: Say) -> None:
    """A `down` that is still under way is waited for; one that was cut short is completed."""
    if not Path(home.processes_dir, guardian.SHUTDOWN_MARK).exists():
        return
    supervisor = guardian.read_live(home.root, "supervisor")
    if supervisor is not None:
        say("waiting for the earlier cluster of this home to end")
        await_gone([supervisor], DOWN_LIMIT_S)
    else:
        end_services(home)


def prepare_home(home: Home) -> None:
    """Makes the home's folders, and a token where there is none. What `check_home` raises; `start-failed`."""
    from racimo.control.home_check import check_home

    check_home(home)
    _clear_of_half_a_join(home)
    try:
        for folder in (home.root, home.service_logs_dir, home.processes_dir):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not home.journal_file.exists():
            clear_of_former_cluster(home)
        if not home.token_file.exists():
            write_private(home.token_file, secrets.token_urlsafe(32).encode())
    except OSError as error:
        raise RacimoError("start-failed", f"cannot write in {home.root}: {error.strerror}") from None


def _clear_of_half_a_join(home: Home) -> None:
    """A `join` that was killed before it was one leaves the other cluster's token: no secret for one of our own."""
    from racimo.client.joined_home import forget_cluster

    if home.token_file.exists() and not home.journal_file.exists() and ":" in home.token_file.read_text():
        forget_cluster(home)


def _refuse_other_slots(config: ClusterConfig, slots: int | None, home: Home) -> None:
    if slots is None or slots == config.slots:
        return
    own = own_node(home, nodes_of(endpoint) if (endpoint := local_endpoint(home)) else [])
    default = f"the default of {len(own.devices)} slots" if own is not None else "its default of slots"
    found = f"{config.slots} slots" if config.slots is not None else default
    raise RacimoError(
        "wrong-state",
        f"the cluster is up already with {found}, not {slots}",
        f"racimo down && racimo up --slots {slots}",
    )


def _change(home: Home, old: ClusterConfig, new: ClusterConfig, say: Say) -> ClusterView:
    """The services that a change concerns start anew with it; what runs goes on meanwhile. A change that cannot be is
    taken back."""
    reachable = new == old or (new.bind, new.carrier) != (old.bind, old.carrier)
    if new.bind != old.bind:
        _refuse_while_others_dial(home, old)
        check_bind(home, new.bind)
    write_private(home.config_file, msgspec.json.encode(new))
    try:
        _start_anew(home, ("control", "agent") if reachable else ("agent",))
        cluster = await_node(home, None, say, is_as_asked=lambda node: _is_as_asked(node, new))
        await_door(home, new.bind)
        return cluster
    except BaseException:
        with uninterrupted():
            write_private(home.config_file, msgspec.json.encode(old))
            _start_anew(home, ("control", "agent") if reachable else ("agent",))
        raise


def _door_is_open(home: Home, bind: str) -> bool:
    """Whether others reach the control process where the home says. Not so after an `up --bind` that was killed between
    its writing and its doing."""
    from racimo.act.tls import fetch_certificate

    try:
        fetch_certificate(bind, shared_token(home).pin, DOOR_LOOK_S)
    except RacimoError:
        return False
    return True


def _refuse_while_others_dial(home: Home, old: ClusterConfig) -> None:
    endpoint = local_endpoint(home)
    nodes = nodes_of(endpoint) if endpoint is not None and old.bind else []
    others = [node for node in nodes if node != own_node(home, nodes)]
    if others:
        names = ", ".join(node.id for node in others[:5])
        raise RacimoError(
            "wrong-state",
            f"{len(others)} nodes have joined at {old.bind} and would no longer reach this one ({names})",
            "racimo down   # on each of them first",
        )


def _is_as_asked(node: Node, config: ClusterConfig) -> bool:
    address = parse_address(config.bind)[0] if config.bind else ""
    return node.price_per_device_hour == config.price and node.address == address


def _start_anew(home: Home, roles: tuple[str, ...]) -> None:
    """Ends these services, which their supervisor starts again; it also looks which others there are to be now."""
    for role in roles:
        record = guardian.read_live(home.root, role)
        if record is not None:
            signal_process(record, signal.SIGTERM)
            await_gone([record], DOWN_LIMIT_S)
    supervisor = guardian.read_live(home.root, "supervisor")
    if supervisor is not None:
        signal_process(supervisor, signal.SIGHUP)


def start_and_await(home: Home, say: Say) -> ClusterView:
    """Starts the supervisor and waits; a start that fails leaves no process behind."""
    pid = guardian.start_supervisor(home.root)
    pidfd = os.pidfd_open(pid)
    try:
        return await_node(home, pidfd, say)
    except BaseException:
        with uninterrupted():
            if supervisor_alive(home):
                end_services(home)
        raise
    finally:
        os.close(pidfd)
