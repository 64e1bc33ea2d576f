"""`racimo ps`, `show`, `why` and `events`."""

import argparse
import contextlib
import sys

from racimo.cli.console import has_colour, table, talk, width, write, write_json
from racimo.cli.parser import add_output, count
from racimo.cli.render import (
    PS_OPTIONAL,
    PS_RIGHT,
    PS_TITLES,
    event_line,
    ps_row,
    reason_lines,
    run_page,
    without_cost,
)
from racimo.spec.errors import RacimoError
from racimo.state.nouns import ENDED


def _ps_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-a", "--all", action="store_true", help="those that ended long ago too")
    parser.add_argument("--limit", type=count, default=50, help="at most so many (50)")
    add_output(parser)


def _ps(args: argparse.Namespace) -> int:
    from racimo.client import Client

    with Client(say=talk, may_start=False) as client:
        runs = client.runs(all=args.all, limit=args.limit)
    if args.output == "json":
        write_json(runs)
        return 0
    if not runs:
        talk("no runs" if args.all else "no runs; racimo ps --all shows those that ended long ago")
        return 0
    rows = [ps_row(view) for view in runs]
    titles: tuple[str, ...] = PS_TITLES
    if not any(view.price_known for view in runs):
        rows, titles = [without_cost(row) for row in rows], without_cost(titles)
    colour = has_colour(sys.stdout)
    optional = [title for title in PS_OPTIONAL if title in titles]
    write(table(titles, rows, columns=width(), colour=colour, right=PS_RIGHT, optional=optional))
    return 0


def _run_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="a run's id, as racimo ps shows it")
    add_output(parser)


def _show(args: argparse.Namespace) -> int:
    from racimo.client import Client

    with Client(say=talk, may_start=False) as client:
        view = client.run(args.run)
        if args.output == "json":
            write_json(view)
            return 0
        write("\n".join(run_page(view)))
        if view.status in ENDED:
            with contextlib.suppress(RacimoError):  # that page is what was asked for
                client.outputs(view.id)  # says what was written where it is no output
    return 0


def _why(args: argparse.Namespace) -> int:
    from racimo.client import Client

    with Client(say=talk, may_start=False) as client:
        reason = client.why(args.run)
    if args.output == "json":
        write_json(reason)
    else:
        write("\n".join(reason_lines(reason)))
    return 0


def _events_arguments(parser: argparse.ArgumentParser) -> None:
    _run_arguments(parser)
    parser.add_argument("-f", "--follow", action="store_true", help="go on until the run has ended")


def _events(args: argparse.Namespace) -> int:
    from racimo.client import Client

    with Client(say=talk, may_start=False) as client:
        for record in client.events(args.run, follow=args.follow):
            if args.output == "json":
                write_json(record)
            else:
                print(event_line(record), flush=args.follow)
    return 0


COMMANDS = {
    "ps": (_ps_arguments, _ps),
    "show": (_run_arguments, _show),
    "why": (_run_arguments, _why),
    "events": (_events_arguments, _events),
}
