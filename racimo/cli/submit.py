"""`racimo run`, `racimo train` and `racimo tune`: from words to a spec, submitted and followed."""

import argparse
from pathlib import Path
from typing import Any

from racimo.cli.console import talk, write, write_json
from racimo.cli.parser import Parser, add_output
from racimo.cli.spec_flags import add_spec_flags, fields_from_flags
from racimo.cli.study_flags import add_extend_flags, add_study_flags, study_from_flags
from racimo.cli.usage import UsageError
from racimo.spec.build import FieldError, build_spec
from racimo.spec.errors import RacimoError
from racimo.spec.quantity import parse_size_bytes
from racimo.spec.run import RunSpec

EXAMPLES = {
    "train": "racimo train train.py --workers 2",
    "tune": "racimo tune train.py:train --metric loss --space lr='log 1e-5..1e-1'",
}
SPEC_SUFFIXES = (".yaml", ".yml")


def _run_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "racimo run [options] -- COMMAND ...\n       racimo run SPEC.yaml [options]"
    parser.description = "Run a command on the cluster and follow what it prints."
    _arguments(parser, "command", "COMMAND")


def _train_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "racimo train FILE[:FUNCTION] [options] [-- ARGUMENTS ...]\n       racimo train SPEC.yaml [options]"
    parser.description = "Train with several workers: a torchrun script as it is, or a function that uses run.steps."
    _arguments(parser, "train", "FILE[:FUNCTION]")


def _tune_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = (
        "racimo tune FILE:FUNCTION --metric NAME --space NAME=RANGE ... [options]\n       racimo tune SPEC.yaml"
        "\n       racimo tune --extend STUDY [--trials COUNT] [options]"
    )
    parser.description = "Search for the best configuration of a training function, many trials at a time."
    _arguments(parser, "tune", "FILE:FUNCTION")
    add_study_flags(parser)
    add_extend_flags(parser)


def _arguments(parser: argparse.ArgumentParser, kind: str, metavar: str) -> None:
    parser.add_argument("words", metavar=metavar, nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parser.add_argument("--detach", action="store_true", help="print the run's id and return at once")
    parser.add_argument("-q", "--quiet", action="store_true", help="no talk on stderr, only what the run prints")
    add_output(parser)
    add_spec_flags(parser, kind=kind)
    parser.set_defaults(parser=parser, kind=kind)


def read_words(args: argparse.Namespace) -> tuple[str, list[str]]:
    """(the spec file or script or "", the user's own words); flags that stood behind the first are put into `args`.

    For `run` the first word that is no option begins the command, with or without `--` before it. For `train` (and
    a YAML file) options may also follow; the script's own arguments stand after `--`."""
    parser: Parser = args.parser
    words: list[str] = args.words
    if words[:1] == ["--"]:
        return "", words[1:]
    if not words or (args.kind == "command" and not words[0].endswith(SPEC_SUFFIXES)):
        return "", words
    first, rest = words[0], words[1:]
    cut = rest.index("--") if "--" in rest else len(rest)
    own, tail = rest[:cut], rest[cut + 1 :]
    args.words = []
    _, unknown = parser.parse_known_args(own, args)
    stray = [*unknown, *args.words]
    if stray:
        if args.kind == "train" and cut == len(rest):
            near = parser.unknown(stray[0]).text
            raise UsageError(
                f"{near}\n  the script's own arguments stand after --: {parser.prog} {first} -- {stray[0]}"
            )
        raise parser.unknown(stray[0])
    return first, tail


def _before_dashes(words: list[str]) -> list[str]:
    return words[: words.index("--")] if "--" in words else words


def make_spec(args: argparse.Namespace, first: str = "") -> tuple[RunSpec, Path | None]:
    """The spec, and the folder where its paths begin (that of the YAML file, else the current one). `first`: the file,
    where the words have been read before."""
    tail: list[str] = []
    if not first:
        first, tail = read_words(args)
    prog = args.parser.prog
    fields = fields_from_flags(args, prog)
    if args.kind == "tune" and (study := study_from_flags(args, prog)):
        fields["study"] = study
    if first.endswith(SPEC_SUFFIXES):
        return _from_yaml(first, fields, tail, args.kind)
    if args.kind == "command":
        if not tail:
            raise UsageError(f"{prog}: no command\n  racimo run -- echo hello")
        fields["command"] = tail
    else:
        if not first:
            raise UsageError(f"{prog}: no {'script' if args.kind == 'train' else 'function'}\n  {EXAMPLES[args.kind]}")
        fields[args.kind], fields["args"] = first, tail
    try:
        return build_spec(fields), None
    except FieldError as error:
        raise error.as_racimo_error() from None


def _from_yaml(name: str, fields: dict[str, Any], tail: list[str], kind: str) -> tuple[RunSpec, Path]:
    from racimo.spec.yaml import parse_spec

    path = Path(name)
    try:
        text = path.read_text()
    except FileNotFoundError:
        raise RacimoError("file-missing", f"{name} does not exist") from None
    except (OSError, UnicodeDecodeError) as error:
        raise RacimoError("file-unreadable", f"cannot read {name}: {error}") from None
    if tail:
        fields["args"] = tail
    folder = path.absolute().parent
    if fields.get("files"):  # a flag's path begins where it was typed
        fields["files"] = str(Path(fields["files"]).absolute())
    spec = parse_spec(text, source=name, overrides=fields)
    if spec.kind != kind:
        command = "run" if spec.kind == "command" else spec.kind
        raise RacimoError("invalid-spec", f"{name} is a {spec.kind} run", f"racimo {command} {name}")
    return spec, folder


def _tune(args: argparse.Namespace) -> int:
    if not args.extend and not any(word.partition("=")[0] == "--extend" for word in _before_dashes(args.words)):
        return _submit(args)
    from racimo.cli.extend import extend

    return extend(args)


def _submit(args: argparse.Namespace) -> int:
    spec, root = make_spec(args)
    try:
        max_upload = parse_size_bytes(args.max_upload) if args.max_upload else None
    except ValueError as error:
        raise UsageError(f"{args.parser.prog}: --max-upload: {error}") from None
    from racimo.client.prepare import prepare

    prepared = prepare(spec, root)  # before a cluster is even looked for: what is wrong here is said at once
    from racimo.client.api import DEFAULT_MAX_UPLOAD_BYTES, Client

    say = (lambda text: None) if args.quiet else talk
    with Client(say=say) as client:
        view = client.submit_prepared(prepared, max_upload or DEFAULT_MAX_UPLOAD_BYTES)
        if args.detach:
            write_json(view) if args.output == "json" else write(view.id)
            say(f"follow it: racimo {'show' if spec.kind == 'tune' else 'logs'} -f {view.id}")
            return 0
        if spec.kind == "tune":
            from racimo.cli.study import follow_study

            return follow_study(client, view, as_json=args.output == "json", quiet=args.quiet)
        from racimo.cli.follow import follow

        return follow(client, view, as_json=args.output == "json", quiet=args.quiet)


COMMANDS = {
    "run": (_run_arguments, _submit),
    "train": (_train_arguments, _submit),
    "tune": (_tune_arguments, _tune),
}
