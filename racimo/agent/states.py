"""The saved states of trials where they are needed: found here, copied from a parent's, fetched from another node.

Whichever candidate has the most rounds is taken, the place where the trial ran last before all others. If none can be
had the trial begins anew, which is said: it is late then, but not lost.
"""

import asyncio
import shutil
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

from racimo.agent.kept import DRAFT_SUFFIX, Kept, drop_others, newest_kept, trial_folder
from racimo.agent.protocol import PeerAddress, SliceOrder, StateAt
from racimo.spec.home import Home

Fetch = Callable[[PeerAddress, str, int, int, Path], Awaitable[Kept | None]]
"""(peer, run, trial, at least so many rounds, into this folder) -> what came; None if there is no such state."""


class States:
    """Of this node, `node`. `fetch` gets one from another node's agent."""

    def __init__(self, home: Home, node: str, fetch: Fetch) -> None:
        self._home, self._node, self._fetch = home, node, fetch

    def is_here(self, run: str, order: SliceOrder) -> bool:
        """Whether nothing has to be copied for this slice."""
        first = order.states[0] if order.states else None
        known = len(order.states) == 1 and first is not None and first.trial == order.grant.trial
        return first is None or (known and first.node == self._node)

    async def bring(self, run: str, order: SliceOrder) -> None:
        """Makes the state of the trial the newest that can be had, in its folder here. `OSError`."""
        trial = order.grant.trial
        folder = trial_folder(self._home.output_dir(run), trial)
        own = await asyncio.to_thread(newest_kept, folder)
        for position, place in enumerate(order.states):
            if own is not None and place.trial != trial:
                break  # it has gone on from its parent's state before
            least = 0 if own is None else own.rounds + (position > 0)
            found = await self._from(place, run, least, folder)
            if found is not None:
                own = found
            if own is not None and own.rounds >= order.saved:
                break
        if own is None and (order.saved or order.grant.state_of is not None):
            print(f"agent: no state of trial {trial} of {run} can be had here: it begins anew", file=sys.stderr)

    async def _from(self, place: StateAt, run: str, least: int, folder: Path) -> Kept | None:
        if place.node == self._node:
            source = trial_folder(self._home.output_dir(run), place.trial)
            return await asyncio.to_thread(_copied, source, folder) if source != folder else None
        if place.peer is None:
            return None
        return await self._fetch(place.peer, run, place.trial, least, folder)


def _copied(source: Path, folder: Path) -> Kept | None:
    """A copy, as a whole: its parent goes on with the original."""
    for _ in range(3):  # the parent may put a newer one in its place at this moment
        kept = newest_kept(source)
        if kept is None:
            return None
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        target = folder / kept.path.name
        draft = target.with_name(target.name + DRAFT_SUFFIX)
        try:
            shutil.copyfile(kept.path, draft)
        except FileNotFoundError:
            continue
        draft.chmod(0o600)
        draft.replace(target)
        drop_others(folder, target)
        return Kept(kept.rounds, target)
    return None
