"""`racimo check`: what could be wrong here and on the nodes, each with its cure; exit code 1 if something is."""

import argparse
import sys
from collections.abc import Iterable

import msgspec

from racimo.cli.console import STYLES, has_colour, write, write_json
from racimo.cli.parser import add_output
from racimo.control.views import Finding
from racimo.spec.home import Home

MAX_WHOLE_SECTIONS = 10


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Look for what is wrong on this machine, on every node of its cluster and on the ways between them, and how to"
        " cure it. Starts and changes nothing."
    )
    add_output(parser)


def _check(args: argparse.Namespace) -> int:
    from racimo.client.findings import examine, examine_nodes

    home = Home.default()
    here, nodes = examine(home), examine_nodes(home)
    if args.output == "json":
        write_json([*here, *nodes])
    else:
        for line in check_lines(here, nodes, colour=has_colour(sys.stdout)):
            write(line)
    return 1 if any(finding.verdict == "wrong" for finding in (*here, *nodes)) else 0


def check_lines(here: Iterable[Finding], nodes: Iterable[Finding], *, colour: bool) -> list[str]:
    """This machine, then each node, then each pair of nodes. Of many, those where all is well share one line."""
    lines = [line for finding in here for line in _lines(finding, colour=colour)]
    of_nodes: dict[str, list[Finding]] = {}
    of_pairs: dict[str, list[Finding]] = {}
    for finding in nodes:
        if finding.peer:
            title = " <-> ".join(sorted((finding.node, finding.peer)))
            of_pairs.setdefault(title, []).append(_directed(finding))
        else:
            of_nodes.setdefault(f"node {finding.node}" if finding.node else "all nodes", []).append(finding)
    for what, sections in (("nodes", of_nodes), ("pairs of nodes", of_pairs)):
        well = [title for title, found in sections.items() if all(one.verdict == "ok" for one in found)]
        left_out = set(well) if len(sections) > MAX_WHOLE_SECTIONS else set()
        for title, findings in sections.items():
            if title not in left_out:
                lines += ["", title, *(line for finding in findings for line in _lines(finding, colour=colour))]
        if left_out:
            words = Finding(verdict="ok", about=what, found=f"all is well with {len(left_out)} of {len(sections)}")
            lines += ["", *_lines(words, colour=colour)]
    return lines


def _directed(finding: Finding) -> Finding:
    return msgspec.structs.replace(finding, about=f"{finding.about} {finding.node} -> {finding.peer}")


def _lines(finding: Finding, *, colour: bool) -> list[str]:
    mark = f"{finding.verdict:<5}"
    if colour:
        mark = f"\x1b[{STYLES[finding.verdict]}m{mark}\x1b[0m"
    lines = [f"{mark}  {finding.about}: {finding.found}"]
    return [*lines, f"         {finding.cure}"] if finding.cure else lines


COMMANDS = {"check": (_arguments, _check)}
