"""The `racimo` command: finds the command's module, loads only that, and turns errors into words and exit codes.

Data goes to stdout, talk to stderr. `racimo --help` must answer in under 150 ms: nothing heavy is imported here.
"""

import importlib
import os
import sys
from typing import TYPE_CHECKING, NamedTuple

from racimo.cli.usage import USAGE, UsageError
from racimo.version import __version__

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable

    from racimo.cli.parser import Parser

    AddArguments = Callable[[Parser], None]
    Execute = Callable[[Namespace], int]


class Command(NamedTuple):
    module: str
    group: str
    summary: str


COMMANDS: dict[str, Command] = {
    "up": Command("service", "cluster", "start a cluster on this machine"),
    "down": Command("service", "cluster", "end it and all its work; on a machine that joined: leave"),
    "join": Command("join", "cluster", "make this machine a node of a cluster elsewhere"),
    "add": Command("add", "cluster", "the same over ssh: racimo add user@host ..."),
    "nodes": Command("nodes", "cluster", "machines, how they are, their devices and who holds them"),
    "drain": Command("nodes", "cluster", "let a node go: what runs there moves or ends"),
    "backup": Command("backup", "cluster", "all that makes this cluster, in one file"),
    "check": Command("check", "cluster", "look for what is wrong here and on the nodes, and how to cure it"),
    "run": Command("submit", "work", "run a command: racimo run -- python prepare.py"),
    "train": Command("submit", "work", "train: racimo train train.py --workers 2..4"),
    "tune": Command("submit", "work", "search: racimo tune train.py:train --metric loss --space lr='log 1e-5..1e-1'"),
    "ps": Command("runs", "look", "runs, newest first"),
    "show": Command("runs", "look", "all about one run (a study: --picture FILE.html, -f as it goes on)"),
    "compare": Command("compare", "look", "studies side by side: how good, after how many trials, for how much"),
    "why": Command("runs", "look", "why a run waits, sits where it sits, or ended"),
    "events": Command("runs", "look", "what happened to a run, one line each"),
    "logs": Command("logs", "look", "what its workers print (-f: as it comes)"),
    "stop": Command("change", "change", "end a run"),
    "pause": Command("change", "change", "save a run and give its devices back"),
    "resume": Command("change", "change", "go on with a paused run"),
    "scale": Command("change", "change", "another number of workers: racimo scale RUN 2..4"),
    "get": Command("fetch", "results", "what a run left behind"),
    "export": Command("export", "results", "trials and metrics to CSV, Parquet, Optuna, MLflow, TensorBoard"),
    "exec": Command("fetch", "results", "a command beside a run's worker: racimo exec RUN -- nvidia-smi"),
    "secret": Command("secret", "cluster", "values that reach workers and are never shown"),
    "version": Command("service", "cluster", "versions of this command and of the cluster"),
}
GROUPS = {
    "cluster": "cluster", "work": "start work", "look": "look at it", "change": "change it", "results": "results"
}  # fmt: skip
HELP_WORDS = frozenset({"help", "--help", "-h"})


def main(argv: list[str] | None = None) -> int:
    """Runs one command; returns its exit code (`spec.errors.ExitCode`)."""
    words = sys.argv[1:] if argv is None else argv
    try:
        code = _dispatch(words)
        sys.stdout.flush()
        return code
    except UsageError as error:
        print(error.text, file=sys.stderr)
        return USAGE
    except KeyboardInterrupt:
        print("racimo: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader (`| head`) has seen enough; nothing may be written at interpreter shutdown either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in HELP_WORDS:
        if len(words) > 1 and words[1] in COMMANDS:
            return _run(words[1], ["--help"])
        print(overview())
        return 0 if words else 2
    if words[0] in ("--version", "-V"):
        print(f"racimo {__version__}")
        return 0
    if words[0] not in COMMANDS:
        raise unknown_command(words[0])
    return _run(words[0], words[1:])


def _run(name: str, words: list[str]) -> int:
    add_arguments, execute = load(name)
    parser = make_parser(name)
    add_arguments(parser)
    args = parser.read(words)
    from racimo.spec.errors import RacimoError

    try:
        return int(execute(args))
    except RacimoError as error:
        from racimo.cli.console import print_error

        print_error(error, as_json=getattr(args, "output", "") == "json")
        return int(error.kind.exit_code)


def load(name: str) -> "tuple[AddArguments, Execute]":
    """The two functions of a command, from its module's table."""
    module = importlib.import_module(f"racimo.cli.{COMMANDS[name].module}")
    add_arguments, execute = module.COMMANDS[name]
    return add_arguments, execute


def make_parser(name: str) -> "Parser":
    from racimo.cli.parser import Parser

    return Parser(prog=f"racimo {name}", description=COMMANDS[name].summary)


def overview() -> str:
    lines = ["usage: racimo COMMAND ...", "", "One command makes a cluster, one more runs a job.", ""]
    for group, title in GROUPS.items():
        lines.append(f"{title}:")
        lines += [f"  {name:9}{c.summary}" for name, c in COMMANDS.items() if c.group == group]
        lines.append("")
    lines.append("racimo COMMAND --help says more. run, train and tune start a cluster where none is running.")
    return "\n".join(lines)


def unknown_command(word: str) -> UsageError:
    import difflib

    near = difflib.get_close_matches(word, COMMANDS, n=1)
    if near:
        hint = f"did you mean racimo {near[0]}?"
    elif word.startswith("-"):
        hint = "options follow their command: racimo COMMAND --option"
    else:
        hint = "racimo --help lists the commands"
    what = "option" if word.startswith("-") else "command"
    return UsageError(f"racimo: unknown {what} {word}\n  {hint}")


if __name__ == "__main__":
    sys.exit(main())
