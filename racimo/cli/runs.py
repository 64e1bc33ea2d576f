"""`racimo ps`, `show`, `why` and `events`."""

import argparse
import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING

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

if TYPE_CHECKING:
    from racimo.client.api import Client
    from racimo.control.views import RunView


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


def _show_arguments(parser: argparse.ArgumentParser) -> None:
    _run_arguments(parser)
    parser.add_argument("--picture", metavar="FILE", help="of a study: FILE.html, FILE.png or FILE.svg")
    parser.add_argument("-f", "--follow", action="store_true", help="of a study: as it goes on, until it has ended")


def _show(args: argparse.Namespace) -> int:
    from racimo.client import Client

    if args.picture:
        from racimo.client.pictures.page import check_picture

        check_picture(Path(args.picture))
    with Client(say=talk, may_start=False) as client:
        view = client.run(args.run)
        if view.spec.study is not None:
            from racimo.cli.show_study import show_study

            return show_study(client, view, args)
        if args.picture or args.follow:
            option = "--picture" if args.picture else "--follow"
            raise RacimoError("wrong-state", f"{option} is for studies, and {view.id} is a {view.kind} run",
                              f"racimo logs -f {view.id}")  # fmt: skip
        if args.output == "json":
            write_json(view)
            return 0
        write("\n".join(run_page(view)))
        _name_strays(client, view)
    return 0


def _name_strays(client: "Client", view: "RunView") -> None:
    """Of a run that has ended: what it wrote where it is no output. The page is what was asked for, with or without."""
    if view.status in ENDED:
        with contextlib.suppress(RacimoError):
            client.outputs(view.id)


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
    "show": (_show_arguments, _show),
    "why": (_run_arguments, _why),
    "events": (_events_arguments, _events),
}
