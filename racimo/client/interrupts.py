"""What must not be cut short by an impatient Ctrl-C, and what must not be done twice at once on one machine."""

import contextlib
import hashlib
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator

from racimo.client.say import Say
from racimo.spec.errors import RacimoError

TURN_MOST_S = 120.0
"""How long another command on this machine may take with the same thing."""


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C counts for nothing inside, here and in programs started here: for the making good of an earlier one, which
    half done would leave processes that nobody knows. Only the main thread has signals to hold off."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    earlier = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, earlier)


@contextlib.contextmanager
def turn(thing: str, what: str, say: Say) -> Iterator[None]:
    """Only one process of this user on this machine is inside for a `thing`; others wait, and `say` so of `what`.

    Held by an abstract socket: it is of the machine (its network namespace) even where homes are on NFS, and ends with
    its process. `RacimoError` busy after `TURN_MOST_S`."""
    name = "\0racimo-" + hashlib.sha256(f"{os.getuid()} {thing}".encode()).hexdigest()[:32]
    until_s = time.monotonic() + TURN_MOST_S
    said = False
    while True:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as own:
            try:
                own.bind(name)
            except OSError:
                if not said:
                    say(f"waiting for another {what} on this machine to end")
                    said = True
                if not _await_end(name, until_s):
                    raise RacimoError(
                        "busy", f"after {TURN_MOST_S:.0f} s another {what} on this machine is still under way",
                        f"ps -ef | grep '[r]acimo'   # shows it: another {what}",
                    ) from None  # fmt: skip
                continue
            own.listen(socket.SOMAXCONN)
            yield
            return


def _await_end(name: str, until_s: float) -> bool:
    """Until whoever holds that name is gone: it says nothing, and its end resets the connection. False at the limit."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as waiting:
        waiting.settimeout(max(0.01, until_s - time.monotonic()))
        try:
            waiting.connect(name)
            waiting.recv(1)
        except TimeoutError:
            return False
        except OSError:
            pass  # it has ended, or does not listen yet
    return time.monotonic() < until_s
