"""What may run here without a word from the control process, and for how long.

A run that only its user understands has one live attempt at most. So when this machine cannot be reached, its attempt
here must have ended before the control process may begin another elsewhere, and this machine sees to that by its own
clock (CLOCK_BOOTTIME, which goes on while the machine is suspended; the control process waits longer by a margin).
Workers of exact training live on: their generation fences them.
"""

import asyncio
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from racimo.agent.processes import boot_id
from racimo.agent.whole_file import write_whole
from racimo.state.lease import LEASE_S

LOOK_EVERY_S = 5.0
NOTE_EVERY_S = 30.0
"""How old the noted contact may be: an agent that starts anew counts from there, so leases end earlier, never later."""


class _Contact(msgspec.Struct, frozen=True):
    boot: str
    at_s: float


def now_s() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Lease:
    """Counts from the last frame that came from the control process. `end_opaque` is called while it is over."""

    def __init__(
        self,
        file: Path,
        end_opaque: Callable[[str], None],
        *,
        lease_s: float = LEASE_S,
        look_every_s: float = LOOK_EVERY_S,
    ) -> None:
        self._file, self._end_opaque = file, end_opaque
        self._lease_s, self._look_every_s = lease_s, look_every_s
        self._noted_s = self._earlier()
        self._contact_s = self._noted_s if self._noted_s is not None else now_s()

    @property
    def over(self) -> bool:
        return now_s() - self._contact_s > self._lease_s

    def renew(self) -> None:
        """The control process was heard just now."""
        self._contact_s = now_s()
        if self._noted_s is None or self._contact_s - self._noted_s > NOTE_EVERY_S:
            self._noted_s = self._contact_s
            try:
                write_whole(self._file, msgspec.json.encode(_Contact(boot_id(), self._contact_s)))
            except OSError as error:  # a full disk; what was noted before ends the lease earlier
                print(f"agent: cannot note the contact with control: {error}", file=sys.stderr)

    async def watch(self) -> None:
        """For ever."""
        while True:
            if self.over:
                minutes = f"{self._lease_s / 60:.0f} m" if self._lease_s >= 60 else f"{self._lease_s:g} s"
                self._end_opaque(f"no word from the control process for {minutes}")
            await asyncio.sleep(self._look_every_s)

    def _earlier(self) -> float | None:
        """What an earlier agent noted since this machine started."""
        try:
            contact = msgspec.json.decode(self._file.read_bytes(), type=_Contact)
        except (FileNotFoundError, msgspec.MsgspecError):
            return None
        return contact.at_s if contact.boot == boot_id() else None
