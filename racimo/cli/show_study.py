"""`racimo show` of a study: its page, its pictures, and its following."""

import argparse
import sys
from pathlib import Path
from typing import Any

import msgspec

from racimo.cli.console import has_colour, talk, width, write, write_json
from racimo.cli.render import run_page
from racimo.cli.study_words import best_words, counts_words, head_words, study_page
from racimo.client.api import Client
from racimo.client.importance import Importance, importance
from racimo.client.pictures.page import study_scene, write_picture
from racimo.client.reading import trial_table
from racimo.client.trial_files import trial_rows
from racimo.client.trial_table import TrialTable
from racimo.control.views import RunView

NUM_JSON = 100
"""Best trials that `-o json` lists; `racimo export` gives all."""


def show_study(client: Client, view: RunView, args: argparse.Namespace) -> int:
    if args.follow:
        from racimo.cli.study import follow_study

        code = follow_study(client, view, as_json=args.output == "json")
        if not args.picture:
            return code
        view = client.run(view.id)
    table = trial_table(client, view)
    found = importance(table)
    if args.picture:
        _draw(view, table, found, Path(args.picture))
        write_json({"picture": args.picture}) if args.output == "json" else write(args.picture)
        return 0
    if args.output == "json":
        write_json(study_json(view, table, found))
        return 0
    colour, columns = has_colour(sys.stdout), width()
    write("\n".join((*run_page(view), *study_page(table, found, columns, colour=colour))))
    if table.top(1):
        talk(f"as a picture: racimo show {view.id} --picture {view.id}.html")
    return 0


def study_json(view: RunView, table: TrialTable, found: list[Importance]) -> dict[str, Any]:
    """The run's own view, and what is known of its trials under `trials`."""
    fields: dict[str, Any] = msgspec.to_builtins(view)
    best = table.best
    return fields | {
        "trials": {
            "counts": table.newest.counts,
            "num_trials": table.newest.num_trials,
            "best": msgspec.to_builtins(best) if best is not None else None,
            "front": [trial.number for trial in table.front] if len(table.objectives) > 1 else [],
            "importance": {one.name: one.share for one in found},
            "top": [msgspec.to_builtins(trial) for trial in table.top(NUM_JSON)],
        }
    }


def _draw(view: RunView, table: TrialTable, found: list[Importance], path: Path) -> None:
    summary = [head_words(view, table).removeprefix(view.id).strip(), counts_words(table)]
    if best := best_words(table):
        summary.append(f"best {best}")
    front = table.front if len(table.objectives) > 1 else []
    numbers = [trial.number for trial in front or table.top(50)]
    rows = {row["trial"]: row for row in trial_rows(table)}
    scene = study_scene(view.id, summary, table, found)
    write_picture(scene, path, title=f"{view.id}: a study", rows=[rows[number] for number in numbers])
