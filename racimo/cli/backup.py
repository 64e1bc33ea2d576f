"""`racimo backup FILE`: all that makes this cluster this cluster, in one file, while it works."""

import argparse
from pathlib import Path

from racimo.cli.console import talk, write
from racimo.spec.quantity import format_size


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Copy journal, files of runs, secrets, token and certificate into FILE (readable by you alone: whoever has it"
        " has the cluster). Outputs are not in it. racimo up --from-backup FILE makes the cluster again, to which the"
        " nodes that had joined come back by themselves if it is at the same address."
    )
    parser.add_argument("file", metavar="FILE", help="a tar; replaced if it is there")


def _backup(args: argparse.Namespace) -> int:
    from racimo.client import Client

    with Client(say=talk, may_start=False) as client:
        made = client.backup(Path(args.file))
    talk(f"{format_size(made.stat().st_size)}; it holds the cluster's secrets: keep it where nobody else reads")
    write(str(made))
    return 0


COMMANDS = {"backup": (_arguments, _backup)}
