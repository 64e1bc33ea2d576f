"""What the API does about nodes: draining one, forgetting one, and copying all that the head knows."""

import asyncio

from racimo.control import backup
from racimo.control.exchange import Exchange
from racimo.control.loop import Loop
from racimo.control.views import DrainRequest, ForgetRequest, OkView
from racimo.spec.errors import RacimoError
from racimo.spec.home import Home

MAX_DEADLINE_S = 30 * 86_400.0


async def drain(loop: Loop, exchange: Exchange) -> None:
    request = await exchange.read(DrainRequest)
    deadline_s = request.deadline_s
    if deadline_s is not None and not 0 <= deadline_s <= MAX_DEADLINE_S:
        raise RacimoError("invalid-request", f"a deadline is 0 to {MAX_DEADLINE_S:.0f} seconds, not {deadline_s:g}")
    node = exchange.path["id"]
    await loop.change(lambda core: core.drain(node, deadline_s, request.undo))
    await exchange.answer(OkView())


async def forget(loop: Loop, exchange: Exchange) -> None:
    request = await exchange.read(ForgetRequest)
    node = exchange.path["id"]
    await loop.change(lambda core: core.forget_node(node, request.confirm_dead))
    await exchange.answer(OkView())


async def send_backup(home: Home, cluster: str, loop: Loop, exchange: Exchange) -> None:
    about = backup.about_now(cluster, loop.core.clock.wall_s())
    file = await asyncio.to_thread(backup.make, home, about)
    await exchange.answer_file(backup.parts(file), backup.size_of(file))
