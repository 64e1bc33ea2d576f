"""`racimo join`: makes this machine a node of a cluster whose head is another."""

import argparse
import sys
from pathlib import Path

import msgspec

from racimo.cli.console import talk, write, write_json
from racimo.cli.parser import add_output, amount, count
from racimo.cli.usage import UsageError
from racimo.spec.config import Token, parse_token
from racimo.spec.errors import RacimoError
from racimo.spec.home import Home
from racimo.state.nouns import Node

MAX_TOKEN_CHARS = 4096


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "racimo join ADDRESS --token-file FILE [--slots N] [--price AMOUNT] [--address IP] [--name NAME]"
    parser.description = (
        "Make this machine a node of a cluster. racimo up --bind IP on the head prints the line to paste here."
        " It goes on after reboots with --service; racimo down leaves the cluster."
    )
    parser.add_argument("address", metavar="ADDRESS", help="the head's IP or IP:PORT")
    parser.add_argument("--token-file", metavar="FILE", help="the cluster's token; - reads it from stdin")
    parser.add_argument("--slots", type=count, help="CPU slots to offer without accelerators (default: its cores)")
    parser.add_argument("--price", type=amount, default=0.0, help="price per device-hour of this node")
    parser.add_argument("--address", dest="own_address", metavar="IP", default="", help="where other nodes reach this")
    parser.add_argument("--name", default="", help="the node's name (default: made of the host's)")
    parser.add_argument(
        "--carrier", choices=("link", "ray"), help="link: without a Ray part here, whatever the head has"
    )
    parser.add_argument("--service", action="store_true", help="a systemd unit, so that it comes back after a reboot")
    add_output(parser)


def _join(args: argparse.Namespace) -> int:
    from racimo.client.joining import Wish, join

    home = Home.default()
    wish = Wish(slots=args.slots, price=args.price, address=args.own_address, name=args.name, carrier=args.carrier)
    joined = join(home, args.address, _read_token(args.token_file), wish, talk)
    if args.service:
        from racimo.cli.service import install_service

        install_service(home)
    if args.output == "json":
        write_json({"cluster": msgspec.to_builtins(joined.cluster), "node": msgspec.to_builtins(joined.node)})
        return 0
    talk(f"this machine is node {joined.node.id} of the cluster at {args.address}")
    write(f"{joined.node.id}  {devices_words(joined.node)}")
    talk("racimo nodes shows all of them, racimo run starts work on them, racimo down leaves the cluster")
    return 0


def devices_words(node: Node) -> str:
    """`4 cpu`, `8 cuda (NVIDIA H100)`."""
    if not node.devices:
        return "no devices"
    first = node.devices[0]
    return f"{len(node.devices)} {first.kind}" + (f" ({first.name})" if first.name else "")


def _read_token(place: str | None) -> Token:
    if place is None:
        raise UsageError(
            "racimo join: no --token-file\n  echo TOKEN | racimo join ADDRESS --token-file -"
            "   # racimo up --bind IP on the head prints it whole"
        )
    if place == "-":
        if sys.stdin.isatty():
            talk("reading the token from the terminal: paste it and press Enter")
        return parse_token(sys.stdin.readline(MAX_TOKEN_CHARS))
    try:
        path = Path(place)
        token = parse_token(path.read_text()[:MAX_TOKEN_CHARS])
        if path.is_file() and path.stat().st_mode & 0o077:  # not of a pipe, such as the shell's <(...)
            talk(f"others on this machine can read the token in {place}: chmod 600 {place}")
        return token
    except OSError as error:
        raise RacimoError("file-unreadable", f"cannot read {place}: {error.strerror}", f"ls -l {place}") from None
    except UnicodeDecodeError:
        raise RacimoError("unauthorized", f"{place} holds no token: it is not text") from None


COMMANDS = {"join": (_arguments, _join)}
