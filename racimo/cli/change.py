"""`racimo stop`, `pause`, `resume` and `scale`."""

import argparse
from collections.abc import Callable

from racimo.cli.console import print_error, talk, write, write_json
from racimo.cli.parser import add_output
from racimo.cli.render import status_words
from racimo.control.views import RunView


def _runs_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", nargs="+", help="a run's id, as racimo ps shows it")
    add_output(parser)


def _change(name: str) -> Callable[[argparse.Namespace], int]:
    def execute(args: argparse.Namespace) -> int:
        from racimo.client import Client
        from racimo.spec.errors import ExitCode, RacimoError

        worst = ExitCode.OK
        with Client(say=talk, may_start=False) as client:
            for run in args.run:
                try:
                    _print(getattr(client, name)(run), args.output)
                except RacimoError as error:  # the others are changed all the same, as far as there is a cluster
                    print_error(error, as_json=args.output == "json")
                    worst = max(worst, error.kind.exit_code)
                    if worst == ExitCode.UNREACHABLE:
                        break
        return worst

    return execute


def _scale_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="a run's id, as racimo ps shows it")
    parser.add_argument("workers", metavar="WORKERS", help="a count or a range: 3 or 2..4")
    add_output(parser)


def _scale(args: argparse.Namespace) -> int:
    from racimo.cli.usage import UsageError
    from racimo.client import Client
    from racimo.spec.quantity import parse_worker_range

    try:
        workers = parse_worker_range(args.workers)
    except ValueError as error:
        raise UsageError(f"racimo scale: {error}") from None
    with Client(say=talk, may_start=False) as client:
        _print(client.scale(args.run, str(workers)), args.output)
    return 0


def _print(view: RunView, output: str) -> None:
    if output == "json":
        write_json(view)
        return
    write(f"{view.id} {status_words(view)}")


COMMANDS = {
    "stop": (_runs_arguments, _change("stop")),
    "pause": (_runs_arguments, _change("pause")),
    "resume": (_runs_arguments, _change("resume")),
    "scale": (_scale_arguments, _scale),
}
