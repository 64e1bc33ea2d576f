"""`racimo tune --extend`: a study goes on under other terms, whether it is still running or has ended."""

import argparse
from collections.abc import Sequence
from typing import Any

import msgspec

from racimo.cli.console import talk, write, write_json
from racimo.cli.study_flags import study_from_flags
from racimo.cli.submit import SPEC_SUFFIXES, make_spec, read_words
from racimo.cli.usage import UsageError
from racimo.spec.build import FieldError, build_spec
from racimo.spec.errors import RacimoError
from racimo.spec.run import RunSpec
from racimo.spec.space import differences
from racimo.spec.study import StudySpec


def extend(args: argparse.Namespace) -> int:
    """Changes it, says what is another than before, and follows the study."""
    from racimo.cli.study import follow_study
    from racimo.client.api import Client

    first, _ = read_words(args)
    given = study_from_flags(args, "racimo tune")
    whole = first.endswith(SPEC_SUFFIXES)
    if whole:
        spec, _ = make_spec(args, first)
        given = msgspec.to_builtins(spec.study)
    elif first:
        raise UsageError(f"racimo tune: --extend goes on with the study's own function, not with {first}")
    with Client(say=(lambda text: None) if args.quiet else talk, may_start=False) as client:
        view = client.run(args.extend)
        if view.spec.study is None:
            raise RacimoError("wrong-state", f"{view.id} is a {view.kind} run: it has no study", "racimo ps")
        terms = changed_terms(view.spec, given, args.without, whole=whole)
        client.change_study(view.id, terms, other_space=args.other_space)
        if not args.quiet:
            for line in term_differences(view.spec.study, terms):
                talk(line)
        if args.detach:
            write_json(client.run(view.id)) if args.output == "json" else write(view.id)
            return 0
        return follow_study(client, client.run(view.id), as_json=args.output == "json", quiet=args.quiet)


def changed_terms(
    spec: RunSpec, given: dict[str, Any], without: Sequence[str] = (), *, whole: bool = False
) -> StudySpec:
    """The study's terms with what is given in their place; parameters of `space` that are not named stay, unless
    `whole`: then `given` is all that holds.

    `RacimoError` `invalid-spec` where the result is none, or a parameter to leave out is not there."""
    assert spec.study is not None
    fields = msgspec.to_builtins(spec.study)
    space = dict(given["space"]) if whole else {**fields["space"], **given.get("space", {})}
    for name in without:
        if name not in space:
            raise RacimoError(
                "invalid-spec", f"there is no parameter {name} to leave out; there are {', '.join(space)}"
            )
        del space[name]
    fields = {**({} if whole else fields), **given, "space": space}
    if without and "defaults" not in given:
        fields["defaults"] = {name: value for name, value in fields.get("defaults", {}).items() if name in space}
    try:
        study = build_spec({"tune": spec.tune, "study": fields}).study
    except FieldError as error:
        raise error.as_racimo_error() from None
    assert study is not None
    return study


def term_differences(old: StudySpec, new: StudySpec) -> list[str]:
    """`trials: 100 -> 200`, a line each; the space parameter by parameter."""
    lines = differences(old.parsed_space, new.parsed_space)
    for name in StudySpec.__struct_fields__:
        before, after = getattr(old, name), getattr(new, name)
        if name not in ("space", "constraints") and before != after:
            lines.append(f"{name}: {_word(before)} -> {_word(after)}")
    return lines


def _word(value: object) -> str:
    if isinstance(value, dict):
        return " ".join(f"{name}={one}" for name, one in value.items()) or "none"
    if isinstance(value, list | tuple):
        return ", ".join(str(one) for one in value) or "none"
    return str(value) if value != "" else "none"
