"""Ending, freezing and thawing workers: signals to their process groups, and polite words to elastic ones."""

import asyncio
import signal

from racimo.agent import processes
from racimo.agent.entry import Entry
from racimo.agent.frames import encode_frame
from racimo.agent.protocol import PleaseLeave, PleasePause, StopWorker


def signal_worker(entry: Entry, number: int) -> None:
    """Signals the worker's whole group, if that very process still lives."""
    if entry.record is None or not processes.is_alive(entry.record):
        return
    entry.killed_by_us = entry.killed_by_us or number == signal.SIGKILL
    if not processes.signal_group(entry.record.pid, number):
        # Forked a moment ago and not yet in a group of its own.
        processes.kill_quietly(entry.record.pid, number)


def stop_worker(entry: Entry, message: StopWorker) -> None:
    """Does what `StopWorker` says; doing it twice changes nothing. The end comes as an event."""
    if not entry.live:
        return
    if entry.record is None:
        if entry.start_task is not None and message.how in ("stop", "abort", "release"):
            entry.start_task.cancel()
        elif message.how == "pause":
            entry.wish = "pause"  # told when it has started and connected
        return
    loop = asyncio.get_running_loop()
    if message.how == "abort":
        signal_worker(entry, signal.SIGKILL)
    elif message.how == "stop":
        terminate(entry, message.grace_s)
    elif message.how == "thaw":
        entry.frozen, entry.wish = False, ""
        signal_worker(entry, signal.SIGCONT)
    elif message.how == "release":
        if entry.wish != "release":
            entry.wish = "release"
            entry.send(encode_frame(PleaseLeave()))
            entry.timers.append(loop.call_later(message.grace_s, terminate, entry, message.grace_s))
    elif entry.ready is not None:
        entry.wish = "pause"
        entry.send(encode_frame(PleasePause()))
    else:
        entry.frozen = True
        signal_worker(entry, signal.SIGSTOP)


def terminate(entry: Entry, grace_s: float) -> None:
    """SIGTERM now (a frozen worker is woken for it), SIGKILL after `grace_s` seconds."""
    signal_worker(entry, signal.SIGTERM)
    signal_worker(entry, signal.SIGCONT)
    entry.frozen = False
    loop = asyncio.get_running_loop()
    entry.timers.append(loop.call_later(max(grace_s, 0.0), signal_worker, entry, signal.SIGKILL))
