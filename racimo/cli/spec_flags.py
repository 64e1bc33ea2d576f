"""A run's spec as flags: the same fields as YAML and Python keywords, and the long spellings of torchrun and Slurm."""

import argparse
import json
from typing import Any

from racimo.cli.parser import count
from racimo.cli.usage import UsageError

SAME_MEANING = {
    "--nproc-per-node": "workers", "--nproc_per_node": "workers", "--ntasks": "workers",
    "--max-restarts": "retries", "--max_restarts": "retries",
    "--cpus-per-task": "threads", "--job-name": "name",
}  # fmt: skip
"""Spellings of torchrun and Slurm that mean the same as a field, and that field."""

FOREIGN_EPILOG = (
    "torchrun's and Slurm's long options are accepted where they mean the same: --nproc-per-node and --ntasks\n"
    "(workers), --nnodes 1, --standalone, --max-restarts (retries), --cpus-per-task (threads), --job-name, --mem,\n"
    "--gpus. Every flag is also a field of the YAML file; flags override it."
)
_COUNTS = ("threads", "retries", "seed")


def add_spec_flags(parser: argparse.ArgumentParser, *, kind: str) -> None:
    add = parser.add_argument_group("what it is given").add_argument
    add("--name", help="the run's name (its id is NAME-NUMBER)")
    add("--workers", metavar="COUNT", help="how many processes" + ("; 2..4: elastic" if kind == "train" else ""))
    add("--devices", metavar="KIND:COUNT", help="devices in total, such as cpu:4 (default: one per worker)")
    add("--threads", type=count, metavar="COUNT", help="threads per worker (1)")
    add("--memory", metavar="SIZE", help="a worker that takes more is ended: 4GB")
    add("--priority", choices=("low", "normal", "high"))
    add("--env", metavar="FILE", help="lock file or requirement list to be installed for it")
    add("--variable", action="append", metavar="NAME=VALUE", help="environment variable")
    add("--secret", action="append", metavar="NAME", help="secret to be given as environment variable")
    add("--files", metavar="DIR", help="the folder that is sent (.)")
    add("--no-files", action="store_true", help="send no files")
    add("--max-upload", metavar="SIZE", help="refuse to send more (512MB)")
    add("--retries", type=count, metavar="COUNT", help="start again so often when it fails (0)")
    add("--seed", type=count)
    add("--stop-grace", metavar="DURATION", help="between SIGTERM and SIGKILL (10s)")
    if kind != "command":
        add("--config", action="append", metavar="KEY=VALUE", help="an entry of config for FILE:FUNCTION; JSON or text")
    if kind == "train":
        add("--hang-after", metavar="DURATION", help="a worker without progress for so long counts as hung (60s)")
        add("--checkpoint-to", metavar="PLACE", help="folder or URL (default: among the run's outputs)")
        add("--checkpoint-every", metavar="INTERVAL", help="such as 10m or '200 steps'")
        add("--checkpoint-keep", type=count, metavar="COUNT", help="how many are kept (2)")
    _add_foreign(parser)


def _add_foreign(parser: argparse.ArgumentParser) -> None:
    for option, field in SAME_MEANING.items():
        kind = count if field in _COUNTS else str
        parser.add_argument(option, dest=field, type=kind, help=argparse.SUPPRESS)
    parser.add_argument("--nnodes", help=argparse.SUPPRESS)
    parser.add_argument("--standalone", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--mem", help=argparse.SUPPRESS)
    parser.add_argument("--gpus", type=count, help=argparse.SUPPRESS)
    parser.epilog = FOREIGN_EPILOG


def fields_from_flags(args: argparse.Namespace, prog: str) -> dict[str, Any]:
    """The fields that were given as flags; raises `UsageError` for what cannot be meant."""
    given = vars(args)
    fields: dict[str, Any] = {}
    for name in (
        "name",
        "workers",
        "devices",
        "memory",
        "priority",
        "env",
        "files",
        "stop_grace",
        "hang_after",
        *_COUNTS,
    ):
        if given.get(name) is not None:
            fields[name] = given[name]
    if given["no_files"]:
        fields["files"] = ""
    if given["secret"]:
        fields["secrets"] = given["secret"]
    if given["variable"]:
        fields["variables"] = dict(name_and_value(word, prog, "--variable") for word in given["variable"])
    if given.get("config"):
        pairs = (name_and_value(word, prog, "--config") for word in given["config"])
        fields["config"] = {key: json_or_text(value) for key, value in pairs}
    checkpoint = {
        key: given[f"checkpoint_{key}"] for key in ("to", "every", "keep") if given.get(f"checkpoint_{key}") is not None
    }
    if checkpoint:
        fields["checkpoint"] = checkpoint
    _apply_foreign(fields, given, prog)
    return fields


def _apply_foreign(fields: dict[str, Any], given: dict[str, Any], prog: str) -> None:
    if given["nnodes"] not in (None, "1", "1:1"):
        raise UsageError(
            f"{prog}: --nnodes {given['nnodes']}: this cluster has one machine; --workers says how many processes"
        )
    if given["mem"] is not None and "memory" not in fields:
        fields["memory"] = slurm_memory(given["mem"])
    if given["gpus"] is not None and "devices" not in fields:
        fields["devices"] = f"cuda:{given['gpus']}"


def slurm_memory(text: str) -> str:
    """Slurm's `--mem`: megabytes without a unit, and K, M, G, T are powers of 1024."""
    if text.isdigit():
        return f"{text}MiB"
    return f"{text}iB" if text[-1:].upper() in ("K", "M", "G", "T") else text


def name_and_value(word: str, prog: str, option: str) -> tuple[str, str]:
    """The parts of NAME=VALUE; `UsageError` naming the option if it is none."""
    name, equals, value = word.partition("=")
    if not equals or not name:
        raise UsageError(f"{prog}: {option} takes NAME=VALUE, not {word!r}")
    return name, value


def json_or_text(value: str) -> Any:
    """What the JSON says, or the text where it is none."""
    try:
        return json.loads(value)
    except ValueError:
        return value
