"""`racimo check`: what could be wrong on this machine, each finding with its cure; exit code 1 if something is."""

import argparse
import sys

from racimo.cli.console import STYLES, has_colour, write, write_json
from racimo.cli.parser import add_output
from racimo.spec.home import Home


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Look for what is wrong here, and how to cure it. Starts and changes nothing."
    add_output(parser)


def _check(args: argparse.Namespace) -> int:
    from racimo.client.findings import examine

    findings = examine(Home.default())
    if args.output == "json":
        write_json(findings)
    else:
        colour = has_colour(sys.stdout)
        for finding in findings:
            mark = f"{finding.verdict:<5}"
            if colour:
                mark = f"\x1b[{STYLES[finding.verdict]}m{mark}\x1b[0m"
            write(f"{mark}  {finding.about}: {finding.found}")
            if finding.cure:
                write(f"         {finding.cure}")
    return 1 if any(finding.verdict == "wrong" for finding in findings) else 0


COMMANDS = {"check": (_arguments, _check)}
