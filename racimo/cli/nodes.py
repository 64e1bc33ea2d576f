"""`racimo nodes` and `racimo drain`: machines, how they are and why, who holds their devices; and letting them go."""

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from racimo.cli.console import has_colour, table, talk, width, write, write_json
from racimo.cli.parser import add_output
from racimo.cli.render import (
    NODE_OPTIONAL,
    NODE_RIGHT,
    NODE_TITLES,
    PROCESS_TITLES,
    node_row,
    node_state,
    process_row,
)
from racimo.cli.usage import UsageError
from racimo.control.views import NodeView

T = TypeVar("T")


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "racimo nodes [--processes] | racimo nodes forget NODE [--confirm-dead]"
    parser.add_argument("what", nargs="?", choices=("forget",), help="forget: give up a node that does not answer")
    parser.add_argument("node", metavar="NODE", nargs="?", default="", help="its name, as racimo nodes shows it")
    parser.add_argument("--processes", action="store_true", help="the cluster's processes and their memory")
    parser.add_argument(
        "--confirm-dead", action="store_true",
        help="you know that nothing runs there any more: commands that held it may move at once",
    )  # fmt: skip
    add_output(parser)


def _nodes(args: argparse.Namespace) -> int:
    from racimo.client import Client

    if args.what == "forget" and not args.node:
        raise UsageError("racimo nodes forget: no NODE\n  racimo nodes   # shows their names")
    with Client(say=talk, may_start=False) as client:
        if args.what == "forget":
            client.forget_node(args.node, confirm_dead=args.confirm_dead)
            talk(f"{args.node} is forgotten; should its agent live and reach this head, it is a node again")
            return 0
        if args.processes:
            return _show_processes(client.nodes(), args.output)
        return _show(client.nodes(), node_row, NODE_TITLES, NODE_RIGHT, NODE_OPTIONAL, args.output)


def _show_processes(views: Sequence[NodeView], output: str) -> int:
    if output == "json":
        of_nodes = [(view.node.id, msgspec.to_builtins(view.processes)) for view in views]
        write_json([{"node": node, **process} for node, processes in of_nodes for process in processes])
        return 0
    rows = [(view.node.id, *process_row(process)) for view in views for process in view.processes]
    titles, right = ("NODE", *PROCESS_TITLES), PROCESS_TITLES[1:]
    write(table(titles, rows, columns=width(), colour=has_colour(sys.stdout), right=right))
    for view in views:
        if not view.processes:
            talk(f"{view.node.id} does not answer: its processes are not among these")
    return 0


def _show(
    views: Sequence[T],
    row: Callable[[T], Sequence[str]],
    titles: Sequence[str],
    right: Sequence[str],
    optional: Sequence[str],
    output: str,
) -> int:
    if output == "json":
        write_json(views)
    else:
        rows = [row(view) for view in views]
        colour = has_colour(sys.stdout)
        write(table(titles, rows, columns=width(), colour=colour, right=right, optional=optional))
    return 0


def _drain_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Give a node nothing new and move what runs there: exact training goes on elsewhere; a command may end by"
        " itself until the deadline, then it is stopped."
    )
    parser.add_argument("node", metavar="NODE", help="its name, as racimo nodes shows it, or its host's")
    parser.add_argument("--deadline", metavar="TIME", help="when the rest is stopped: 90s, 10m, 2h (default: never)")
    parser.add_argument("--undo", action="store_true", help="it takes work again")
    add_output(parser)


def _drain(args: argparse.Namespace) -> int:
    from racimo.client import Client
    from racimo.spec.quantity import parse_duration_s

    try:
        deadline_s = None if args.deadline is None else parse_duration_s(args.deadline)
    except ValueError as error:
        raise UsageError(f"racimo drain: --deadline: {error}\n  racimo drain {args.node} --deadline 10m") from None
    if args.undo and deadline_s is not None:
        raise UsageError("racimo drain: --undo takes no --deadline\n  racimo drain --help")
    with Client(say=talk, may_start=False) as client:
        client.drain(args.node, deadline_s=deadline_s, undo=args.undo)
        views = client.nodes()
    of_name = [view for view in views if view.node.id == args.node]
    view = next(view for view in (*of_name, *views) if args.node in (view.node.id, view.node.host))
    if args.output == "json":
        write_json(view)
    else:
        held = len(set(view.leases.values()))
        workers = "no workers there" if not held else f"{held} workers there" if held > 1 else "1 worker there"
        write(f"{view.node.id} {node_state(view)}, {workers}")
    return 0


COMMANDS = {"nodes": (_arguments, _nodes), "drain": (_drain_arguments, _drain)}
