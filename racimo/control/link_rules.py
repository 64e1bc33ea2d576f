"""Whom the control process lets in: what a machine must bring along to be a node of this cluster."""

import hmac

import msgspec

from racimo.act.versions import minor_of, version_problem
from racimo.agent.protocol import LinkHello, Refused
from racimo.state.nouns import Node
from racimo.version import PROTOCOL_VERSION, __version__

MAX_CLOCK_OFF_S = 120.0
_OWN_HOME = "export RACIMO_HOME=$HOME/.racimo-node   # there; then the line that racimo up shows on the head"


class House(msgspec.Struct, frozen=True, kw_only=True):
    """What a newcomer is held against."""

    secret: str
    cluster: str
    local_node: str
    versions: dict[str, str]
    """Of the head."""


def refusal(hello: LinkHello, house: House, wall_s: float) -> Refused | None:
    """Why this machine may not be a node; None if it may. Without the token it learns nothing else."""
    if not house.secret or not hmac.compare_digest(hello.token.encode(), house.secret.encode()):
        hint = "racimo up   # on the head shows the line to paste here"
        return Refused(code="unauthorized", message="the token is not the one of this cluster", hint=hint)
    node = hello.welcome.node
    if hello.cluster not in ("", house.cluster):
        message = f"{node.host} joined cluster {hello.cluster}, and this is cluster {house.cluster}"
        return Refused(
            code="join-refused", message=message, hint="racimo down   # there; then the line that racimo up shows here"
        )
    if hello.protocol != PROTOCOL_VERSION:
        return _other_racimo(hello)
    return (
        _other_versions(node, house.versions) or _clock_off(node.host, hello.wall_s - wall_s) or _is_head(node, house)
    )


def _other_racimo(hello: LinkHello) -> Refused:
    node = hello.welcome.node
    message = (
        f"the head runs racimo {__version__} (protocol {PROTOCOL_VERSION}), {node.host} runs racimo"
        f" {node.versions.get('racimo', '?')} (protocol {hello.protocol})"
    )
    return Refused(code="version-mismatch", message=message, hint=f"pip install racimo=={__version__}   # there")


def _other_versions(node: Node, versions: dict[str, str]) -> Refused | None:
    problem = version_problem(versions, node.versions)
    if not problem:
        return None
    torch = f"pip install 'torch=={minor_of(versions.get('torch', ''))}.*'   # there; Python {versions['python']}"
    return Refused(code="version-mismatch", message=f"{node.host}: {problem}", hint=torch)


def _clock_off(host: str, off_s: float) -> Refused | None:
    if abs(off_s) <= MAX_CLOCK_OFF_S:
        return None
    way = "ahead of" if off_s > 0 else "behind"
    message = f"the clock of {host} is {_amount(abs(off_s))} {way} the head's, and {MAX_CLOCK_OFF_S:g} s may be"
    return Refused(code="clock-off", message=message, hint="timedatectl set-ntp true   # there, or on the head")


def _amount(seconds: float) -> str:
    for unit_s, unit in ((86_400, "d"), (3_600, "h"), (60, "m")):
        if seconds >= 2 * unit_s:
            return f"{seconds / unit_s:.0f} {unit}"
    return f"{seconds:.0f} s"


def _is_head(node: Node, house: House) -> Refused | None:
    if node.id != house.local_node:
        return None
    message = f"{node.host} comes with the identity of the head itself ({node.id}): its home folder is a copy"
    return Refused(code="join-refused", message=message, hint=_OWN_HOME)


def twice(node: Node) -> Refused:
    """For a node that is linked already, by another agent that lives."""
    message = f"node {node.id} ({node.host}) is linked already: two machines use copies of one home folder"
    return Refused(code="join-refused", message=message, hint=_OWN_HOME)


def elsewhere(node: Node, known: Node | None) -> Refused | None:
    """For a node that is away, and for which another machine answers now: neither its host's name nor its address is
    the one that is known. None if it is the same."""
    if known is None or node.host == known.host or (node.address and node.address == known.address):
        return None
    message = (
        f"node {node.id} is host {known.host} ({known.address or 'local'}), and {node.host} comes in its name: its home"
        " folder is a copy, or the machine was renamed"
    )
    hint = f"{_OWN_HOME}. If it was renamed, on the head: racimo nodes forget {node.id} --confirm-dead"
    return Refused(code="join-refused", message=message, hint=hint)
