"""`racimo get` and `racimo exec`: what a run left behind, and a command beside one of its workers."""

import argparse
import filecmp
import os
import sys
from pathlib import Path

from racimo.cli.console import talk, width, write, write_json
from racimo.cli.parser import Parser, add_output, count
from racimo.cli.render import exit_words, format_wall
from racimo.cli.usage import UsageError
from racimo.client.api import Client
from racimo.client.snapshot import FETCHED_MARK
from racimo.control.views import OutputView
from racimo.spec.errors import RacimoError
from racimo.spec.home import Home
from racimo.spec.quantity import format_size
from racimo.state.nouns import Exit

SIGNALLED = 128
"""Exit codes from here on are, in a shell, 128 and the number of a signal."""
NO_OUTPUTS = "racimo show {run}   # outputs are what it writes to $RACIMO_OUTPUT_DIR, not to its working folder"


def _get_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "List a run's outputs, or fetch one of them, a folder of them, or all."
    parser.add_argument("run", metavar="RUN", help="a run's id, as racimo ps shows it")
    parser.add_argument("path", metavar="PATH", nargs="?", default="", help="the file or folder to fetch")
    parser.add_argument("--all", action="store_true", help="fetch everything, into ./RUN/ or --to")
    parser.add_argument("--node", metavar="NODE", default="", help="only what lies there (default: on all its nodes)")
    parser.add_argument("--force", action="store_true", help="over files that are there already and are others")
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
        targets = [(output, _target(output.path, args)) for output in wanted]
        if not args.force:
            for output, target in targets:
                if target.exists() and (not target.is_file() or target.stat().st_size != output.size_bytes):
                    raise _is_there(target)
        if [output.path for output in wanted] != [args.path]:
            _mark(args)
        for output, target in targets:
            _fetch(client, args, output, target)
            if output.others and not args.node:
                others = ", ".join(output.others)
                talk(f"{output.path} is that of {output.node}; {others} wrote one too: racimo get ... --node NODE")
            if args.output == "json":
                write_json({"path": output.path, "to": str(target), "size_bytes": output.size_bytes})
            else:
                write(f"{target}  {format_size(output.size_bytes)}")
    return 0


def _fetch(client: Client, args: argparse.Namespace, output: OutputView, target: Path) -> None:
    """A file that is there already is left, unless it is the same or `--force` was given."""
    if args.force or not target.exists():
        client.download(args.run, output.path, target, node=args.node)
        return
    draft = target.with_name(f".{target.name}.fetched.{os.getpid()}")
    try:
        client.download(args.run, output.path, draft, node=args.node)
        if not filecmp.cmp(draft, target, shallow=False):
            raise _is_there(target)
    finally:
        draft.unlink(missing_ok=True)


def _is_there(target: Path) -> RacimoError:
    words = f"{target} is there already and is another file: nothing is written over it"
    return RacimoError("wrong-state", words, "racimo get ... --force   # replaces it; or --to PLACE")


def _mark(args: argparse.Namespace) -> None:
    """A folder that is made here for what is fetched is not sent along with the next run."""
    folder = Path(args.to or args.run)
    if not folder.exists():
        try:
            folder.mkdir(parents=True)
            (folder / FETCHED_MARK).write_text(f"Made by racimo get {args.run}; not sent along with runs.\n")
        except OSError as error:
            raise RacimoError("file-unreadable", f"cannot write {folder}: {error.strerror}") from None


def _chosen(client: Client, run: str, path: str, node: str) -> list[OutputView]:
    outputs = client.outputs(run, node=node)
    there = f" on {node}" if node else ""
    if not path:
        if not outputs:
            raise RacimoError(
                "output-missing",
                f"{run} has left no outputs{there} (so far){_restored(client)}",
                NO_OUTPUTS.format(run=run),
            )
        return outputs
    wanted = [output for output in outputs if output.path == path or output.path.startswith(path.rstrip("/") + "/")]
    if not wanted:
        raise RacimoError("output-missing", f"{run} has no output {path}{there}", f"racimo get {run}   # lists them")
    return wanted


def _restored(client: Client) -> str:
    """That this machine's cluster was made from a backup, which holds none of the outputs of its time."""
    try:
        from_backup = Home(Path(client.cluster().home)).restored_file.exists()
    except OSError:
        return ""
    return "; this cluster was made from a backup, and backups hold no outputs" if from_backup else ""


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
        write(f"{one.path:<{size}}  {format_size(one.size_bytes):>9}  {format_wall(one.modified_wall_s)}{_where(one)}")


def _where(one: OutputView) -> str:
    return f"  {one.node} (also {', '.join(one.others)})" if one.others else ""


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
