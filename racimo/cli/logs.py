"""`racimo logs`: what the workers of a run print, kept on disk by their node."""

import argparse
import sys

from racimo.cli.console import talk, write_json
from racimo.cli.parser import add_output, count
from racimo.cli.render import log_text
from racimo.control.views import RunView
from racimo.spec.errors import RacimoError
from racimo.state.nouns import ENDED


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="a run's id, as racimo ps shows it")
    parser.add_argument("-f", "--follow", action="store_true", help="go on until the run has ended")
    parser.add_argument("--worker", type=count, metavar="INDEX", help="only this worker (racimo show lists them)")
    parser.add_argument("--tail", type=count, metavar="LINES", help="only the last lines")
    add_output(parser)


def _logs(args: argparse.Namespace) -> int:
    from racimo.client import Client

    with Client(say=talk, may_start=False) as client:
        view = client.run(args.run)
        if args.worker is not None:
            _check_worker(view, args.worker, may_come=args.follow and view.status not in ENDED)
        worker = "" if args.worker is None else args.worker
        if args.follow:
            from racimo.cli.follow import follow

            as_json = args.output == "json"
            return follow(client, view, as_json=as_json, came_back=True, worker=worker, tail=args.tail)
        for line in client.logs(args.run, worker=worker, tail=args.tail):
            if args.output == "json":
                write_json(line)
                continue
            stream = sys.stderr if line.stream == "err" else sys.stdout
            print(log_text(line, with_worker=worker == "" and view.most > 1), file=stream)
    return 0


def _check_worker(view: RunView, index: int, *, may_come: bool) -> None:
    known = [worker.index for worker in view.workers]
    if index in known or may_come or index < max(known, default=0):  # the oldest of many replaced ones are not listed
        return
    words = f"only {', '.join(map(str, known))}" if known else f"none so far ({view.status})"
    raise RacimoError("invalid-request", f"{view.id} has no worker {index}, {words}", f"racimo show {view.id}")


COMMANDS = {"logs": (_arguments, _logs)}
