"""`python -m racimo.agent --home DIR --slots N --price P`: the daemon of one node."""

import argparse
import asyncio
import fcntl
import os
import signal
import sys
import time
from pathlib import Path

import msgspec

from racimo.act import guardian
from racimo.act.allocator import give_back_freed_memory
from racimo.agent import processes
from racimo.agent.daemon import Agent
from racimo.agent.discovery import discover_node
from racimo.agent.private_folder import make_private_folder
from racimo.agent.uplink import own_address
from racimo.spec.config import JoinConfig, parse_address, read_config, read_join
from racimo.spec.errors import ExitCode
from racimo.spec.home import Home

LOCK_TIMEOUT_S = 5.0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m racimo.agent", description=__doc__)
    parser.add_argument("--home", type=Path, required=True, help="the cluster's home folder")
    parser.add_argument("--slots", type=int, default=None, help="CPU slots where there is no accelerator")
    parser.add_argument("--price", type=float, default=0.0, help="price per device-hour")
    return parser.parse_args()


def _lock(path: Path) -> int | None:
    """The lock of this home's agent, waited for (an earlier agent may be leaving); None if another keeps it."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def give_up(_number: int, _frame: object) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, LOCK_TIMEOUT_S)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        return fd
    except TimeoutError:
        return None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


async def _serve(home: Home, slots: int | None, price: float) -> None:
    join, bind = read_join(home), read_config(home).bind
    agent = Agent(home, msgspec.structs.replace(discover_node(home, slots, price), address=_address(join, bind)))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, agent.stopped.set)
    await agent.serve_peers()
    await agent.server.listen(home.agent_socket)
    if join is not None:
        agent.join(join)
    watch = guardian.watch(home.root, loop, lambda sentence: print(f"agent: {sentence}", file=sys.stderr))
    await agent.stopped.wait()
    if watch is not None:
        watch.close()
    await agent.close()


def _address(join: JoinConfig | None, bind: str) -> str:
    """Where other nodes reach this one; "" for a cluster of one machine, or while there is no way to the head."""
    if join is None:
        return parse_address(bind)[0] if bind else ""
    return join.address_of_this_node or own_address(parse_address(join.address)[0])


def main() -> int:
    arguments = _parse()
    home = Home(arguments.home.absolute())
    for folder in (home.root, home.node_dir, home.processes_dir, home.service_logs_dir):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    make_private_folder(home.agent_socket.parent)
    if _lock(home.node_dir / "agent.lock") is None:
        print(f"racimo: another agent serves {home.root}", file=sys.stderr)
        return ExitCode.UNREACHABLE
    processes.set_child_subreaper()
    give_back_freed_memory()
    processes.write_process_file(home.processes_dir / "agent.json", "agent", time.monotonic())
    asyncio.run(_serve(home, arguments.slots, arguments.price))
    return ExitCode.OK


if __name__ == "__main__":
    sys.exit(main())
