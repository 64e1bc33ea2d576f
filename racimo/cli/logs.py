"""`racimo logs`: what the workers of a run print, kept on disk by their node."""

import argparse
import sys
from typing import TYPE_CHECKING

from racimo.cli.console import talk, write_json
from racimo.cli.parser import add_output, count
from racimo.cli.render import come_back, log_text
from racimo.spec.errors import ExitCode
from racimo.state.nouns import ENDED

if TYPE_CHECKING:
    from racimo.client import Client


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="a run's id, as racimo ps shows it")
    parser.add_argument("-f", "--follow", action="store_true", help="go on until the run has ended")
    parser.add_argument("--worker", type=count, metavar="INDEX", help="only this worker (racimo show lists them)")
    parser.add_argument("--tail", type=count, metavar="LINES", help="only the last lines")
    add_output(parser)


def _logs(args: argparse.Namespace) -> int:
    from racimo.client import Client

    with Client(say=talk) as client:
        view = client.run(args.run)
        try:
            _print_lines(client, args, with_worker=args.worker is None and view.most > 1)
        except KeyboardInterrupt:
            if not args.follow or view.status in ENDED:
                raise
            print(f"\n{come_back(args.run)}", file=sys.stderr)
            return ExitCode.INTERRUPTED
    return 0


def _print_lines(client: "Client", args: argparse.Namespace, *, with_worker: bool) -> None:
    worker = "" if args.worker is None else args.worker
    for line in client.logs(args.run, follow=args.follow, worker=worker, tail=args.tail):
        if args.output == "json":
            write_json(line)
            continue
        stream = sys.stderr if line.stream == "err" else sys.stdout
        print(log_text(line, with_worker=with_worker), file=stream, flush=args.follow)


COMMANDS = {"logs": (_arguments, _logs)}
