"""`racimo compare`: studies side by side."""

import argparse
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from racimo.cli.console import has_colour, table, talk, width, write, write_json
from racimo.cli.parser import add_output
from racimo.cli.render import UNKNOWN, format_money
from racimo.cli.study_words import short
from racimo.spec.errors import RacimoError
from racimo.spec.quantity import format_duration

if TYPE_CHECKING:
    from racimo.client.api import Client
    from racimo.client.pictures.page import Compared
    from racimo.client.trial_table import TrialTable

TITLES = ("STUDY", "STATUS", "TRIALS", "BEST", "TRIAL", "FOUND AFTER", "DEVICE TIME", "COST", "PROPOSER", "SCHEDULER")
RIGHT = ("TRIALS", "BEST", "TRIAL", "FOUND AFTER", "DEVICE TIME", "COST")
OPTIONAL = ("STATUS", "TRIAL", "COST", "DEVICE TIME", "FOUND AFTER", "PROPOSER")


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One study. `found_after_s`: device-seconds until its best value was there."""

    study: str
    status: str
    metric: str
    num_trials: int
    best: float | None
    trial: int | None
    found_after_s: float | None
    device_s: float
    cost: float | None
    proposer: str
    scheduler: str


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "The best value so far of studies with the same metric, over trials and over device time."
    parser.add_argument("run", metavar="STUDY", nargs="+", help="tune runs' ids, as racimo ps shows them")
    parser.add_argument("--picture", metavar="FILE", help="FILE.html, FILE.png or FILE.svg")
    add_output(parser)


def _compare(args: argparse.Namespace) -> int:
    from racimo.client import Client
    from racimo.client.pictures.page import check_picture, compare_scene, write_picture

    if args.picture:
        check_picture(Path(args.picture))
    with Client(say=talk, may_start=False) as client:
        found = [_read(client, run) for run in dict.fromkeys(args.run)]
    objective = found[0][1].objectives[0]
    for row, _, _ in found[1:]:
        if row.metric != str(objective):
            raise RacimoError(
                "invalid-request", f"{args.run[0]} looks for {objective}, and {row.study} for {row.metric}"
            )
    if args.picture:
        scene = compare_scene([compared for _, _, compared in found], str(objective))
        lines = [msgspec.structs.asdict(row) for row, _, _ in found]
        write_picture(scene, Path(args.picture), title="Studies compared", rows=lines)
        talk(f"the picture: {args.picture}")
    rows = sorted(
        (row for row, _, _ in found), key=lambda row: math.inf if row.best is None else objective.signed(row.best)
    )
    if args.output == "json":
        write_json(rows)
    else:
        write(compare_table(rows, columns=width(), colour=has_colour(sys.stdout)))
    return 0


def _read(client: "Client", run: str) -> "tuple[Row, TrialTable, Compared]":
    from racimo.client.pictures.page import Compared
    from racimo.client.reading import trial_table

    view = client.run(run)
    trials = trial_table(client, view)
    way = trials.way(client.events(run), view.spec.devices_per_worker)
    best = trials.best
    row = Row(
        study=view.id,
        status=view.status,
        metric=str(trials.objectives[0]),
        num_trials=trials.newest.num_trials,
        best=trials.value(best) if best is not None else None,
        trial=best.number if best is not None else None,
        found_after_s=next(point.device_s for point in way if point.best == way[-1].best) if way else None,
        device_s=view.device_s,
        cost=view.cost if view.price_known else None,
        proposer=trials.terms.proposer,
        scheduler=trials.terms.scheduler,
    )
    return row, trials, Compared(name=view.id, way=way, per_trial=trials.history)


def compare_table(rows: list[Row], *, columns: int, colour: bool) -> str:
    """The best one first."""
    titles = tuple(rows[0].metric.upper() if title == "BEST" else title for title in TITLES)
    cells = [
        (
            row.study,
            row.status,
            str(row.num_trials),
            short(row.best) if row.best is not None else UNKNOWN,
            str(row.trial) if row.trial is not None else UNKNOWN,
            format_duration(row.found_after_s) if row.found_after_s is not None else UNKNOWN,
            format_duration(row.device_s),
            format_money(row.cost) if row.cost is not None else UNKNOWN,
            row.proposer,
            row.scheduler,
        )
        for row in rows
    ]
    right = (*RIGHT, titles[TITLES.index("BEST")])
    return table(titles, cells, columns=columns, colour=colour, right=right, optional=OPTIONAL)


COMMANDS = {"compare": (_arguments, _compare)}
