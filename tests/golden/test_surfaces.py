"""Names that users rely on, frozen: flags, the YAML schema, SDK names, the client's methods, error codes."""

import inspect
import json
import re
from collections.abc import Callable
from pathlib import Path

import msgspec

import racimo
from racimo.cli.main import COMMANDS, load, make_parser
from racimo.cli.spec_flags import SAME_MEANING
from racimo.client import Client
from racimo.spec.build import field_names
from racimo.spec.errors import ERROR_KINDS
from racimo.spec.run import RunSpec
from racimo.spec.study import StudySpec

Golden = Callable[[str, str], None]
ERRORS_PAGE = Path(__file__).parents[2] / "docs" / "errors.md"


def test_every_flag_of_every_command(golden: Golden) -> None:
    lines = []
    for name in sorted(COMMANDS):
        add_arguments, _ = load(name)
        parser = make_parser(name)
        add_arguments(parser)
        lines.append(f"{name}: {' '.join(parser.option_strings())}")
    golden("flags.txt", "\n".join(lines))


def test_no_short_meaning_for_the_letters_that_the_field_disagrees_on() -> None:
    for name in COMMANDS:
        add_arguments, _ = load(name)
        parser = make_parser(name)
        add_arguments(parser)
        assert not {"-n", "-d", "-c"} & set(parser.option_strings()), name


def test_the_yaml_schema(golden: Golden) -> None:
    golden("run-schema.json", json.dumps(msgspec.json.schema(RunSpec), indent=1, sort_keys=True))


def test_every_field_has_a_flag() -> None:
    """One spec, three spellings."""
    add_arguments, _ = load("train")
    parser = make_parser("train")
    add_arguments(parser)
    options = set(parser.option_strings())
    spelled = {"variables": "--variable", "secrets": "--secret", "checkpoint": "--checkpoint-to"}
    as_words = {"train", "tune", "command", "args", "study"}
    for field in field_names():
        assert field in as_words or spelled.get(field, f"--{field.replace('_', '-')}") in options, field
    assert set(SAME_MEANING) <= options


def test_every_field_of_a_study_has_a_flag() -> None:
    add_arguments, _ = load("tune")
    parser = make_parser("tune")
    add_arguments(parser)
    options = set(parser.option_strings())
    spelled = {"constraints": "--constraint", "limits": "--limit", "defaults": "--default"}
    in_a_file_only = {"points", "retries", "retry_raised"}
    for field in StudySpec.__struct_fields__:
        assert field in in_a_file_only or spelled.get(field, f"--{field.replace('_', '-')}") in options, field


def test_the_names_that_import_racimo_gives(golden: Golden) -> None:
    golden("sdk-names.txt", "\n".join(sorted(racimo.__all__)))


def test_the_methods_of_the_client(golden: Golden) -> None:
    public = {name: value for name, value in vars(Client).items() if callable(value) and not name.startswith("_")}
    lines = [f"{name}({', '.join(inspect.signature(value).parameters)})" for name, value in sorted(public.items())]
    golden("client-methods.txt", "\n".join(lines))


def test_every_error_code_has_its_section_with_the_right_numbers() -> None:
    page = ERRORS_PAGE.read_text()
    sections = re.findall(r"^## (\S+)\n\*exit (\d), HTTP (\d+)\.\*", page, re.MULTILINE)
    on_page = {code: (int(exit_code), int(status)) for code, exit_code, status in sections}
    assert on_page == {code: (int(kind.exit_code), kind.http_status) for code, kind in ERROR_KINDS.items()}
    assert len(re.findall("^## ", page, re.MULTILINE)) == len(sections)


def test_every_section_says_what_to_do() -> None:
    for section in ERRORS_PAGE.read_text().split("\n## ")[1:]:
        assert len(section.split("\n", 1)[1].split()) > 12, section.split("\n")[0]
