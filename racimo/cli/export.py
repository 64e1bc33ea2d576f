"""`racimo export`: trials and reports for other programs, as files or into their own stores."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from racimo.cli.console import talk, write, write_json
from racimo.cli.parser import add_output
from racimo.cli.usage import UsageError

if TYPE_CHECKING:
    from racimo.client.api import Client

LOOK_S = 2.0
"""Between two looks at what a run reports, while it is followed."""


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Write the trials of a study, or the reports of a training run, to a file .csv or .parquet (without FILE: CSV "
        "to stdout), or copy them into Optuna, MLflow or TensorBoard."
    )
    parser.add_argument("run", metavar="RUN", help="a run's id, as racimo ps shows it")
    parser.add_argument("file", metavar="FILE", nargs="?", help="FILE.csv or FILE.parquet")
    parser.add_argument("--optuna", metavar="STORAGE", help="to a new study there: sqlite:///studies.db")
    parser.add_argument("--mlflow", metavar="URI", help="to an experiment there: http://127.0.0.1:5000, sqlite:///m.db")
    parser.add_argument("--tensorboard", metavar="FOLDER", help="event files below it")
    parser.add_argument("--as", dest="name", metavar="NAME", default="", help="its name there (the run's id)")
    parser.add_argument(
        "-f", "--follow", action="store_true", help="MLflow, TensorBoard: go on until the run has ended"
    )
    add_output(parser)


def _export(args: argparse.Namespace) -> int:
    targets = [name for name in ("file", "optuna", "mlflow", "tensorboard") if getattr(args, name)]
    if len(targets) > 1:
        raise UsageError(f"racimo export: one target at a time, not {' and '.join(targets)}\n  racimo export --help")
    target = targets[0] if targets else "file"
    if args.follow and target not in ("mlflow", "tensorboard"):
        raise UsageError("racimo export: --follow goes with --mlflow and --tensorboard")
    if args.file:
        from racimo.client.trial_files import check_rows_file

        check_rows_file(Path(args.file))
    from racimo.client import Client

    with Client(say=talk, may_start=False) as client:
        if target == "file":
            return _to_file(client, args)
        if target == "optuna":
            return _to_optuna(client, args)
        return _to_tracker(client, args)


def _to_file(client: "Client", args: argparse.Namespace) -> int:
    from racimo.client.reading import all_reports, trial_table
    from racimo.client.trial_files import as_csv, report_rows, trial_rows, write_rows

    view = client.run(args.run)
    if view.spec.study is not None:
        rows = trial_rows(trial_table(client, view))
    else:
        rows = report_rows(all_reports(client, view.id))
    if not args.file:
        write_json(rows) if args.output == "json" else write(as_csv(rows).rstrip("\n"))
        return 0
    write_rows(rows, Path(args.file))
    _said(args, f"{args.file}: {len(rows)} {'trials' if view.spec.study is not None else 'reports'}", len(rows))
    return 0


def _to_optuna(client: "Client", args: argparse.Namespace) -> int:
    from racimo.client.optuna_export import export_to_optuna
    from racimo.client.reading import trial_table

    name = args.name or args.run
    written, left_out = export_to_optuna(trial_table(client, client.run(args.run)), name, args.optuna)
    rest = f"; {left_out} left out, which told nothing or lie outside the space" if left_out else ""
    _said(args, f"{args.optuna}: study {name}, {written} trials{rest}", written)
    return 0


def _to_tracker(client: "Client", args: argparse.Namespace) -> int:
    from racimo.client.reading import follow_into
    from racimo.client.trackers import MLflowExperiment, TensorBoardFolder, Tracker

    view = client.run(args.run)
    name = args.name or view.id
    tracker: Tracker = MLflowExperiment(args.mlflow, name) if args.mlflow else TensorBoardFolder(Path(args.tensorboard))
    try:
        written = follow_into(client, view, tracker, until_ended=args.follow, look_s=LOOK_S)
    finally:
        tracker.close()
    _said(args, f"{args.mlflow or args.tensorboard}: {written} of {name}", written)
    return 0


def _said(args: argparse.Namespace, text: str, written: int) -> None:
    if args.output == "json":
        write_json({"run": args.run, "written": written})
    else:
        write(text)


COMMANDS = {"export": (_arguments, _export)}
