"""Which nodes do not answer, who is stuck on them, and which pairs of nodes cannot reach each other.

One task looks at all channels; a beat only leaves its word. Silence alone loses nothing: the control process may be the
one that was away. What it says is put together in `decide`.
"""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable

from racimo.control.carrier_channel import Channel
from racimo.control.core import Core
from racimo.state.fold import State
from racimo.state.nouns import parse_worker_id

SILENT_AFTER_S = 2.0
"""How long an agent may be away (its supervisor starts it again in a fraction) before its node counts as silent."""
SILENT_BEATS = 4
"""So many beats in a row may be missing where they come more seldom."""
LOOK_EVERY_S = 0.1
LOOK_AT_PAIRS_EVERY_S = 1.0
FORGET_AFTER_S = 60.0
PAIR_AFTER_S = 10.0
"""How long one worker cannot connect to another, both of whose nodes answer, before that is a finding."""

Tell = Callable[[Callable[[Core], object]], Awaitable[None]]


class Silence:
    """`channels` by node; `tell` takes a change to the core; `state` is the newest."""

    def __init__(self, channels: dict[str, Channel], tell: Tell, state: Callable[[], State]) -> None:
        self._channels, self._tell, self._state = channels, tell, state
        self._pairs: dict[tuple[str, int, int, int], float] = {}
        """(run, attempt, from, to) and since when, counted anew once it was said."""

    async def run(self) -> None:
        """For ever."""
        pairs_due_s = 0.0
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            now_s = time.monotonic()
            await self._look_for_silence(now_s)
            await self._look_for_stuck()
            if now_s >= pairs_due_s:
                pairs_due_s = now_s + LOOK_AT_PAIRS_EVERY_S
                await self._look_for_pairs(now_s)
                self._drop_forgotten(now_s)

    async def _look_for_silence(self, now_s: float) -> None:
        fallen: list[Channel] = []
        for channel in self._channels.values():
            if channel.look_at_s > now_s:
                continue
            left_s = _allowed_s(channel) - _quiet_s(channel, now_s)
            if left_s > 0:
                channel.look_at_s = now_s + left_s
            else:
                fallen.append(channel)
        if any(channel.client is not None for channel in fallen):
            # Nodes behind one cut cable beat last within one interval: all of them now, not one after the other.
            fallen += [channel for channel in self._channels.values() if _falls_with(channel, now_s)]
        for channel in fallen:
            channel.look_at_s = math.inf
            channel.said_silent = True
            if channel.client is not None:
                channel.client.abort()  # it dials again, and that is how it is found to be back
        if fallen:
            await self._tell(lambda core: _silence(core, fallen))

    async def _look_for_stuck(self) -> None:
        """Says it until the core takes it: what nobody who answers vouches for is dropped there."""
        nodes, said = self._state().nodes, self._state().stuck
        silent = {node for node in self._channels if node in nodes and nodes[node].status == "silent"} - said.keys()
        if not silent:
            return
        for channel in [channel for channel in self._channels.values() if not channel.said_silent]:
            for wait in channel.waits:
                run, attempt, _ = parse_worker_id(wait.worker)
                for index in {*wait.waits_for, *wait.unreachable}:
                    worker = self._state().worker(run, attempt, index)
                    if worker is None or not worker.live or worker.node not in silent:
                        continue
                    node, witness = worker.node, wait.worker
                    silent.discard(node)
                    await self._tell(lambda core, node=node, by=witness: core.node_stuck(node, by))  # type: ignore[misc]

    async def _look_for_pairs(self, now_s: float) -> None:
        found: dict[tuple[str, int, int, int], float] = {}
        for channel in self._channels.values():
            for wait in channel.waits:
                run, attempt, one = parse_worker_id(wait.worker)
                for other in wait.unreachable:
                    if self._is_answered(run, attempt, other):
                        pair = (run, attempt, one, other)
                        found[pair] = self._pairs.get(pair, now_s)
        self._pairs = found
        for pair, since_s in list(found.items()):
            if now_s - since_s > PAIR_AFTER_S:
                run, _, one, other = pair
                found[pair] = now_s
                await self._tell(lambda core, run=run, a=one, b=other: core.pair_unreachable(run, a, b))  # type: ignore[misc]

    def _drop_forgotten(self, now_s: float) -> None:
        """Channels of nodes that left, once nobody can be waiting for them."""
        for node, channel in list(self._channels.items()):
            gone = channel.said_silent and channel.client is None and node not in self._state().nodes
            if gone and now_s - channel.quiet_since_s > FORGET_AFTER_S:
                del self._channels[node]

    def _is_answered(self, run: str, attempt: int, index: int) -> bool:
        worker = self._state().worker(run, attempt, index)
        if worker is None or not worker.live:
            return False
        channel = self._channels.get(worker.node)
        return channel is not None and channel.client is not None and not channel.said_silent


def _quiet_s(channel: Channel, now_s: float) -> float:
    client = channel.client
    if client is None:
        return now_s - channel.quiet_since_s
    if not channel.is_link:
        return 0.0
    quiet_s = now_s - client.heard_s
    if quiet_s <= _allowed_s(channel):
        return quiet_s
    # Parts of a long answer, or what came while this process itself was kept from running, are signs of life too.
    return min(quiet_s, client.last_byte_ago_s())


def _silence(core: Core, fallen: list[Channel]) -> None:
    for channel in fallen:
        core.node_silent(channel.node)


def _falls_with(channel: Channel, now_s: float) -> bool:
    """A link that another's silence makes suspect: its beat is late as well."""
    suspect = channel.client is not None and channel.is_link and now_s < channel.look_at_s < math.inf
    return suspect and _quiet_s(channel, now_s) > _allowed_s(channel) - channel.promise_s


def _allowed_s(channel: Channel) -> float:
    if channel.client is None:
        return SILENT_AFTER_S
    return max(SILENT_AFTER_S, channel.promise_s * SILENT_BEATS)
