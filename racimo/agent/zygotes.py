"""The zygotes of a node: `plain` and `torch` from the start, two more per built environment when it is first used."""

import asyncio
from collections.abc import Callable
from pathlib import Path

from racimo.agent.launch import Reaped
from racimo.agent.zygote_keeper import ZygoteKeeper, default_python
from racimo.spec.home import Home

MAX_ZYGOTES = 6
"""Two of the cluster's own interpreter and some of environments; each takes about 200 MB."""


class Zygotes:
    """All keepers by name. `on_reaped` and `on_lost` are told about workers of any of them."""

    def __init__(
        self,
        home: Home,
        on_reaped: Callable[[Reaped], None],
        on_lost: Callable[[frozenset[str]], None],
    ) -> None:
        self._home, self._on_reaped, self._on_lost = home, on_reaped, on_lost
        self._keepers: dict[str, ZygoteKeeper] = {}
        self._closing: set[asyncio.Task[None]] = set()
        for preload in ("plain", "torch"):
            self.get(preload)

    @property
    def keepers(self) -> list[ZygoteKeeper]:
        return list(self._keepers.values())

    def get(self, preload: str, environment: str = "", python: Path | None = None) -> ZygoteKeeper:
        """The keeper for a kind of worker, in the environment of that hash (with its interpreter) if one is given."""
        name = f"{preload}-{environment}" if environment else preload
        if name not in self._keepers:
            self._make_room()
            interpreter = str(python) if python is not None else default_python()
            self._keepers[name] = ZygoteKeeper(self._home, name, preload, interpreter, self._on_reaped, self._on_lost)
        keeper = self._keepers.pop(name)
        self._keepers[name] = keeper  # the most recently used last
        return keeper

    def _make_room(self) -> None:
        """Ends zygotes of environments that have no workers, the one used longest ago first, to keep to the bound."""
        extra = [name for name, keeper in self._keepers.items() if "-" in name and keeper.idle]
        while len(self._keepers) >= MAX_ZYGOTES and extra:
            keeper = self._keepers.pop(extra.pop(0))
            task = asyncio.create_task(keeper.close(end_zygote=True))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    def is_parent_known(self, worker: str) -> bool:
        """Whether a connected zygote is that worker's parent, so that it will tell its exit."""
        return any(worker in keeper.workers | keeper.parted_workers for keeper in self._keepers.values())

    async def settle(self, timeout_s: float) -> None:
        """Waits until every zygote of an earlier agent has told what it knows."""
        connecting = [keeper.settled(timeout_s) for keeper in self._keepers.values() if keeper.is_of_earlier_agent]
        await asyncio.gather(*connecting)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a person should know, such as a zygote that is still importing."""
        found = []
        for keeper in self._keepers.values():
            if keeper.failed_starts:
                found.append(
                    f"the {keeper.name} zygote does not start ({keeper.failed_starts} tries): {keeper.last_error}"
                )
            elif not keeper.ready and keeper.name.startswith("torch"):
                found.append("the torch zygote is still importing torch; training runs start as soon as it has")
        return tuple(found)

    async def close(self, *, end_zygotes: bool) -> None:
        for keeper in self._keepers.values():
            await keeper.close(end_zygote=end_zygotes)
