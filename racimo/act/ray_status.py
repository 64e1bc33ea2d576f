"""What the Ray part of this machine says of itself (`node/ray.json`). Outside `racimo.act.ray`, so that everybody may
read it: only that package may know Ray."""

from typing import Literal

import msgspec

from racimo.spec.home import Home


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

    state: Literal["up", "starting", "waiting", "down"]
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
