"""`python -m racimo.act.ray --home DIR`: the supervisor's role `ray`. Ends, with all that it started, at SIGTERM."""

import argparse
import asyncio
import fcntl
import logging
import os
import signal
import sys
from pathlib import Path

from racimo.act import guardian
from racimo.act.ray import place
from racimo.act.ray.keeper import Keeper
from racimo.spec.errors import ExitCode
from racimo.spec.home import Home


async def _serve(home: Home) -> None:
    keeper = Keeper(home)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, keeper.stopped.set)
    await keeper.run()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m racimo.act.ray", description=__doc__)
    parser.add_argument("--home", type=Path, required=True, help="the cluster's home folder")
    home = Home(parser.parse_args().home.absolute())
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    lock = os.open(place.folder(home) / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print(f"racimo: another process looks after Ray for {home.root}", file=sys.stderr)
        return ExitCode.UNREACHABLE
    guardian.write_record(home.root, "ray")
    asyncio.run(_serve(home))
    return ExitCode.OK


if __name__ == "__main__":
    sys.exit(main())
