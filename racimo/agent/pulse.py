"""A wake-up for any number of waiters: each `beat` wakes all that wait at that moment."""

import asyncio
from collections.abc import Callable


class Pulse:
    """Like a condition variable without a lock. Check what you wait for, then `wait`, without awaiting in between."""

    def __init__(self) -> None:
        self._waiters: set[asyncio.Future[None]] = set()
        self.listeners: set[Callable[[], None]] = set()
        """Called at every beat: for who listens to many pulses at once."""

    def beat(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._waiters.clear()
        for listener in list(self.listeners):
            listener()

    async def wait(self, timeout_s: float) -> bool:
        """True at the next beat, False after `timeout_s` seconds without one."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        try:
            async with asyncio.timeout(timeout_s):
                await waiter
            return True
        except TimeoutError:
            return False
        finally:
            self._waiters.discard(waiter)
