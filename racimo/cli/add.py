"""`racimo add user@host ...`: machines become nodes over ssh, Racimo brought along."""

import argparse
import sys
import threading
from pathlib import Path

from racimo.cli.console import is_terminal, print_error, talk, write, write_json
from racimo.cli.join import devices_words
from racimo.cli.parser import add_output, amount, count
from racimo.spec.errors import RacimoError
from racimo.spec.home import Home


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Make machines nodes of this machine's cluster, over ssh with your own configuration and keys. Racimo comes"
        " along into ~/.racimo/venv there, where a Python of this one's version is; the cluster must have been started"
        " with racimo up --bind IP. Hosts that fail do not keep the others from joining; then the exit code is 1."
    )
    parser.add_argument("hosts", metavar="HOST", nargs="+", help="user@host, or a name of your ssh configuration")
    parser.add_argument("--slots", type=count, help="CPU slots of each, without accelerators (default: its cores)")
    parser.add_argument("--price", type=amount, default=0.0, help="price per device-hour of each")
    parser.add_argument("--service", action="store_true", help="a systemd unit there, for after a reboot")
    parser.add_argument("--ssh-config", metavar="FILE", type=Path, help="another configuration of ssh (ssh -F)")
    add_output(parser)


class Board:
    """One line for each host: rewritten in place on a terminal, written anew elsewhere."""

    def __init__(self, hosts: list[str]) -> None:
        self._lock = threading.Lock()
        self._live = is_terminal(sys.stderr)
        self._lines = dict.fromkeys(hosts, "waiting")
        self._width = max(len(host) for host in hosts)
        if self._live:
            self._draw()

    def show(self, host: str, words: str) -> None:
        with self._lock:
            self._lines[host] = words
            if self._live:
                print(f"\x1b[{len(self._lines)}A", end="", file=sys.stderr)
                self._draw()
            else:
                talk(f"{host}: {words}")

    def _draw(self) -> None:
        for host, words in self._lines.items():
            print(f"\x1b[2K{host:<{self._width}}  {words}", file=sys.stderr, flush=True)


def _add(args: argparse.Namespace) -> int:
    from racimo.client.add import Wish, add

    wish = Wish(slots=args.slots, price=args.price, service=args.service, ssh_config=args.ssh_config)
    results = add(Home.default(), args.hosts, wish, Board(list(dict.fromkeys(args.hosts))).show)
    if args.output == "json":
        write_json(results)
    else:
        for added in results:
            if added.error is not None:
                print_error(RacimoError(added.error.code, added.error.message, added.error.hint))
            elif added.node is not None:
                write(f"{added.host}  {added.node.id}  {devices_words(added.node)}")
            else:
                write(f"{added.host}  {added.note}")
    return 1 if any(added.error is not None for added in results) else 0


COMMANDS = {"add": (_arguments, _add)}
