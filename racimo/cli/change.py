"""`racimo stop`, `pause`, `resume` and `scale`."""

import argparse
from collections.abc import Callable

from racimo.cli.console import talk, write, write_json
from racimo.cli.parser import add_output
from racimo.control.views import RunView


def _runs_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", nargs="+", help="a run's id, as racimo ps shows it")
    add_output(parser)


def _change(name: str) -> Callable[[argparse.Namespace], int]:
    def execute(args: argparse.Namespace) -> int:
        from racimo.client import Client

        with Client(say=talk) as client:
            for run in args.run:
                _print(getattr(client, name)(run), args.output)
        return 0

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
    with Client(say=talk) as client:
        _print(client.scale(args.run, str(workers)), args.output)
    return 0


def _print(view: RunView, output: str) -> None:
    if output == "json":
        write_json(view)
        return
    reason = f": {view.reason.text}" if view.reason is not None else ""
    write(f"{view.id} {view.status}{reason}")


COMMANDS = {
    "stop": (_runs_arguments, _change("stop")),
    "pause": (_runs_arguments, _change("pause")),
    "resume": (_runs_arguments, _change("resume")),
    "scale": (_scale_arguments, _scale),
}
