"""What the Ray part of this machine says of itself (`node/ray.json`). Outside `racimo.act.ray`, so that everybody may
read it: only that package may know Ray."""

import time
from typing import Literal

import msgspec

from racimo.spec.home import Home

RayState = Literal["up", "starting", "waiting", "down"]
NOTE_AFTER_S = 30.0
"""What heals by itself within this time is not worth a note."""


class RayPort(msgspec.Struct, frozen=True, kw_only=True):
    """A TCP port on which the Ray part listens. `everywhere`: on all interfaces, whatever address it was given."""

    port: int
    what: str
    everywhere: bool


class RayStatus(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """up: it runs. starting. waiting: for the head's part. down: it ended or cannot run, and is tried again.

    Whatever it is, the node works without it. `since_wall_s` is for people, `reason` one sentence, `address` where the
    cluster's Ray is found (`IP:PORT`). `relays` by node: `up`, or what is wrong; the head alone knows them.
    """

    state: RayState
    since_wall_s: float
    reason: str = ""
    address: str = ""
    ports: tuple[RayPort, ...] = ()
    relays: dict[str, str] = {}


def read_ray_status(home: Home) -> RayStatus | None:
    """None where this machine has no Ray part, or what it left is not as written."""
    try:
        return msgspec.json.decode((home.node_dir / "ray.json").read_bytes(), type=RayStatus)
    except (FileNotFoundError, msgspec.MsgspecError):
        return None


def ray_ports(home: Home) -> tuple[RayPort, ...]:
    """The TCP ports on which this machine's Ray part listens now."""
    status = read_ray_status(home)
    return () if status is None else status.ports


def ray_notes(home: Home) -> tuple[str, ...]:
    """What a person should know of it: sentences, none while all is well."""
    status = read_ray_status(home)
    if status is None or time.time() - status.since_wall_s < NOTE_AFTER_S:
        return ()
    if status.state != "up":
        since = time.strftime("%H:%M", time.localtime(status.since_wall_s))
        return (f"Ray is not up here since {since}: {status.reason or status.state}; the node works without it",)
    wrong = {node: state for node, state in status.relays.items() if state not in ("up", "starting")}
    return tuple(f"Ray's accounts of {node}: {state}" for node, state in sorted(wrong.items()))
