"""`racimo nodes`: machines, devices, who holds them, and what the cluster's own processes weigh."""

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import TypeVar

from racimo.cli.console import has_colour, table, talk, width, write, write_json
from racimo.cli.parser import add_output
from racimo.cli.render import NODE_TITLES, PROCESS_TITLES, node_row, process_row

T = TypeVar("T")


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--processes", action="store_true", help="the cluster's processes and their memory")
    add_output(parser)


def _nodes(args: argparse.Namespace) -> int:
    from racimo.client import Client

    with Client(say=talk, may_start=False) as client:
        if args.processes:
            return _show(client.cluster().processes, process_row, PROCESS_TITLES, PROCESS_TITLES[1:], args.output)
        return _show(client.nodes(), node_row, NODE_TITLES, ("FREE", "MEMORY FREE", "DISK FREE"), args.output)


def _show(
    views: Sequence[T], row: Callable[[T], Sequence[str]], titles: Sequence[str], right: Sequence[str], output: str
) -> int:
    if output == "json":
        write_json(views)
    else:
        rows = [row(view) for view in views]
        write(table(titles, rows, columns=width(), colour=has_colour(sys.stdout), right=right))
    return 0


COMMANDS = {"nodes": (_arguments, _nodes)}
