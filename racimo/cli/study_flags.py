"""The `study` of a tune run as flags."""

import argparse
from typing import Any

from racimo.cli.parser import count
from racimo.cli.spec_flags import json_or_text, name_and_value

_PLAIN = (
    "trials",
    "parallel",
    "time",
    "budget",
    "proposer",
    "scheduler",
    "first_round",
    "eta",
    "rounds",
    "metric_within",
)


def add_study_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("what is looked for").add_argument
    add(
        "--metric",
        action="append",
        metavar="NAME",
        help="what trials report: loss, or 'max accuracy'; several: a front",
    )
    add("--space", action="append", metavar="NAME=RANGE",
        help="0.1..0.9, 'log 1e-5..1e-1', 1..8, '32..256 step 32' or [sgd,adam]")  # fmt: skip
    add("--constraint", action="append", metavar="CONDITION", help="over parameters: 'width * layers <= 2048'")
    add("--limit", action="append", metavar="CONDITION", help="over metrics: 'latency_ms <= 50'")
    add("--default", action="append", metavar="NAME=VALUE", help="tried first")
    add("--point", action="append", metavar="'NAME=VALUE ...'", help="a whole configuration, tried after that")
    add("--trials", type=count, metavar="COUNT", help="at most so many (100)")
    add("--parallel", type=count, metavar="COUNT", help="so many at a time (as many as there are devices for)")
    add("--time", metavar="DURATION", help="ends after: 2h")
    add("--budget", metavar="MONEY", help="ends before it would cost more: $20")
    add(
        "--proposer", metavar="NAME", help="tpe, random, grid, quasi-random, gp, cma-es, nsga-ii or FILE.py:CLASS (tpe)"
    )
    add("--scheduler", metavar="NAME", help="asha, freeze-thaw, population, median or none (asha)")
    add("--rounds", type=count, metavar="COUNT", help="reports after which a trial is complete")
    add("--first-round", type=count, metavar="COUNT", help="reports after which trials are first compared (1)")
    add("--eta", type=count, metavar="COUNT", help="one of so many goes on (3)")
    add("--trial-retries", type=count, metavar="COUNT", help="so often a trial goes on after its worker died (2)")
    add("--retry-raised", action="store_true", help="and after its function raised")
    add("--fresh", action="store_true", help="a new process for each trial")
    add("--metric-within", metavar="DURATION", help="a trial that reports nothing for so long has failed (10m)")


def add_extend_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("going on with a study").add_argument
    add("--extend", metavar="STUDY", default="", help="go on with it, also after its end, under what is given here")
    add("--without", action="append", metavar="NAME", default=[], help="with --extend: a parameter less")
    add("--other-space", action="store_true", help="with --extend: the space is meant to be another one")


def study_from_flags(args: argparse.Namespace, prog: str) -> dict[str, Any]:
    """The fields that were given; raises `UsageError` for what cannot be meant."""
    given = vars(args)
    study: dict[str, Any] = {name: given[name] for name in _PLAIN if given.get(name) is not None}
    if given["metric"]:
        study["metric"] = given["metric"][0] if len(given["metric"]) == 1 else given["metric"]
    if given["space"]:
        study["space"] = dict(_parameter(word, prog) for word in given["space"])
    if given["default"]:
        pairs = (name_and_value(word, prog, "--default") for word in given["default"])
        study["defaults"] = {name: _scalar(value) for name, value in pairs}
    if given["point"]:
        points = ([name_and_value(pair, prog, "--point") for pair in word.split()] for word in given["point"])
        study["points"] = [{name: _scalar(value) for name, value in point} for point in points]
    if given["trial_retries"] is not None:
        study["retries"] = given["trial_retries"]
    for name in ("retry_raised", "fresh"):
        if given[name]:
            study[name] = True
    for flag, field in (("constraint", "constraints"), ("limit", "limits")):
        if given[flag]:
            study[field] = given[flag]
    return study


def _parameter(word: str, prog: str) -> tuple[str, Any]:
    name, value = name_and_value(word, prog, "--space")
    if value.startswith("[") and value.endswith("]"):
        return name, [_scalar(item.strip()) for item in value[1:-1].split(",")]
    return name, value


def _scalar(text: str) -> Any:
    value = json_or_text(text)
    return value if isinstance(value, bool | int | float | str) or value is None else text
