"""Whose turn it is on a device: a worker starts once no other live one holds what it was given.

The control process gives a device away again when it knows its worker to have ended, or gives it up together with its
node. In the second case the worker may still live when the node is back: a stray, which is being ended. So the next
order for that device (or of a newer attempt of that run) waits for it here, and nothing is counted twice in the state.
"""

import time
from collections.abc import Mapping

from racimo.agent.entry import Entry
from racimo.agent.pulse import Pulse
from racimo.spec.errors import RacimoError

STRAY_WAIT_S = 30.0
"""How long a killed process may take to be gone. One stuck in a driver may take for ever."""


def strays(entries: Mapping[str, Entry], entry: Entry) -> list[Entry]:
    """The workers that must have ended before `entry` starts: those ordered before it that hold one of its devices or
    are of an older attempt of its run. An `exec` command holds nothing of its own."""
    found: list[Entry] = []
    if entry.order.exec_of:
        return found
    devices = set(entry.order.devices)
    for other in entries.values():
        if other is entry:
            break
        if not other.live or other.order.exec_of:
            continue
        sibling = other.run == entry.run and other.attempt == entry.attempt
        if sibling and entry.order.shares > 1:
            continue  # they share a device
        if (other.run == entry.run and other.attempt < entry.attempt) or devices & set(other.order.devices):
            found.append(other)
    return found


async def await_turn(entries: Mapping[str, Entry], entry: Entry, ended: Pulse, most_s: float = STRAY_WAIT_S) -> None:
    """Returns once nobody is in the way. `RacimoError` wrong-state if that takes longer than `most_s` seconds."""
    deadline_s = time.monotonic() + most_s
    while in_the_way := strays(entries, entry):
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            names = ", ".join(other.name for other in in_the_way)
            raise RacimoError("wrong-state", f"{entry.name} cannot start: {names} did not end within {most_s:g} s")
        await ended.wait(left_s)
