"""`racimo get` and `racimo exec`: what a run left behind, and a command beside one of its workers."""

import argparse
import sys
from pathlib import Path

from racimo.cli.console import talk, width, write, write_json
from racimo.cli.parser import Parser, add_output, count
from racimo.cli.render import exit_words, format_wall
from racimo.cli.usage import UsageError
from racimo.client.api import Client
from racimo.control.views import OutputView
from racimo.spec.errors import RacimoError
from racimo.spec.quantity import format_size
from racimo.state.nouns import Exit

SIGNALLED = 128
"""Exit codes from here on are, in a shell, 128 and the number of a signal."""


def _get_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "List a run's outputs, or fetch one of them, a folder of them, or all."
    parser.add_argument("run", metavar="RUN", help="a run's id, as racimo ps shows it")
    parser.add_argument("path", metavar="PATH", nargs="?", default="", help="the file or folder to fetch")
    parser.add_argument("--all", action="store_true", help="fetch everything, into ./RUN/ or --to")
    parser.add_argument("--node", metavar="NODE", default="", help="only what lies there (default: on all its nodes)")
    parser.add_argument("--to", metavar="PLACE", help="file or folder to write to; - for stdout")
    add_output(parser)


def _get(args: argparse.Namespace) -> int:
    with Client(say=talk, may_start=False) as client:
        wanted = _chosen(client, args.run, args.path, args.node)
        if not args.path and not args.all:
            _list(wanted, args.output)
            return 0
        if args.to == "-":
            if [output.path for output in wanted] != [args.path]:
                raise UsageError("racimo get: --to - writes one file: give its PATH")
            for chunk in client.read_output(args.run, args.path, node=args.node):
                sys.stdout.buffer.write(chunk)
            sys.stdout.buffer.flush()
            return 0
        for output in wanted:
            target = _target(output.path, args)
            client.download(args.run, output.path, target, node=args.node)
            if args.output == "json":
                write_json({"path": output.path, "to": str(target), "size_bytes": output.size_bytes})
            else:
                write(f"{target}  {format_size(output.size_bytes)}")
    return 0


def _chosen(client: Client, run: str, path: str, node: str) -> list[OutputView]:
    outputs = client.outputs(run, node=node)
    there = f" on {node}" if node else ""
    if not path:
        if not outputs:
            raise RacimoError("output-missing", f"{run} has left no outputs{there} (so far)", f"racimo show {run}")
        return outputs
    wanted = [output for output in outputs if output.path == path or output.path.startswith(path.rstrip("/") + "/")]
    if not wanted:
        raise RacimoError("output-missing", f"{run} has no output {path}{there}", f"racimo get {run}   # lists them")
    return wanted


def _target(path: str, args: argparse.Namespace) -> Path:
    if args.path == path:  # one file
        to = Path(args.to or Path(path).name)
        return to / Path(path).name if to.is_dir() or (args.to or "").endswith("/") else to
    folder = Path(args.to or args.run)
    return folder / path


def _list(outputs: list[OutputView], output: str) -> None:
    if output == "json":
        write_json(outputs)
        return
    size = min(max((len(o.path) for o in outputs), default=0), width())
    for one in outputs:
        write(f"{one.path:<{size}}  {format_size(one.size_bytes):>9}  {format_wall(one.modified_wall_s)}")


def _exec_arguments(parser: Parser) -> None:
    parser.usage = "racimo exec RUN [--worker INDEX] [-o json] -- COMMAND ..."
    parser.description = (
        "Run a command beside a run's worker, in its folder and environment: racimo exec RUN -- nvidia-smi\n"
        "The exit code is the command's own (128 + N where signal N ended it)."
    )
    parser.add_argument("run", metavar="RUN", help="a run's id, as racimo ps shows it")
    parser.add_argument("--worker", type=count, metavar="INDEX", help="beside this worker (default: the first)")
    add_output(parser)
    parser.after_dashes = "command"


def _exec(args: argparse.Namespace) -> int:
    if not args.command:
        raise UsageError("racimo exec: no command\n  racimo exec RUN -- ps aux")
    with Client(say=talk, may_start=False) as client:
        for item in client.exec(args.run, args.command, "" if args.worker is None else args.worker):
            if args.output == "json":
                write_json(item)
            elif not isinstance(item, Exit):
                print(item.text, file=sys.stderr if item.stream == "err" else sys.stdout, flush=True)
            if isinstance(item, Exit):
                if item.outcome != "finished":
                    talk(f"{' '.join(args.command)}: {exit_words(item)}")
                return exit_code(item)
    raise RacimoError("worker-lost", "the command's end was not seen", f"racimo show {args.run}")


def exit_code(exit: Exit) -> int:
    """The command's own, as ssh passes it on; as a shell has it, 128 and the signal for one that was killed."""
    if exit.outcome == "finished":
        return 0
    if exit.signal is not None:
        return SIGNALLED + exit.signal
    return exit.code or 1


COMMANDS = {"get": (_get_arguments, _get), "exec": (_exec_arguments, _exec)}
