"""argparse with the errors of this house: one sentence, the closest known option, exit code 2."""

import argparse
import re
from collections.abc import Sequence
from typing import Any, NoReturn

from racimo.cli.usage import UsageError

NO_SHORT_MEANING = {
    "-n": "--workers (launchers disagree on what -n counts)",
    "-d": "--detach (elsewhere -d also means devices or debug)",
    "-c": "--threads (elsewhere -c also means cores or a command)",
}


class Parser(argparse.ArgumentParser):
    def __init__(self, **settings: Any) -> None:
        settings.setdefault("formatter_class", _Formatter)
        super().__init__(allow_abbrev=False, **settings)
        self.after_dashes = ""
        """Where the words after `--` go, if the command takes some (argparse gets this wrong with `nargs='*'`)."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.prog}: {message}\n  {self.prog} --help")

    def read(self, args: Sequence[str]) -> argparse.Namespace:
        """The parsed words of one command; raises `UsageError`."""
        words = list(args)
        tail: list[str] = []
        if self.after_dashes and "--" in words:
            cut = words.index("--")
            words, tail = words[:cut], words[cut + 1 :]
        parsed, unknown = self.parse_known_args(words)
        if self.after_dashes:
            setattr(parsed, self.after_dashes, tail)
        if unknown:
            raise self.unknown(unknown[0])
        return parsed

    def unknown(self, word: str) -> UsageError:
        """An error for a word that nothing here takes."""
        if not word.startswith("-"):
            hint = f"{self.prog} --help"
            if self.after_dashes:
                hint = f"the command stands after --: {self.prog} RUN -- {word}"
            return UsageError(f"{self.prog}: {word!r} is one argument too many\n  {hint}")
        name = word.partition("=")[0]
        hint = f"{self.prog} --help"
        if name in NO_SHORT_MEANING:
            hint = f"write {NO_SHORT_MEANING[name]}"
        else:
            import difflib

            near = difflib.get_close_matches(name, self.option_strings(), n=1, cutoff=0.65)
            if near:
                hint = f"did you mean {near[0]}?"
        return UsageError(f"{self.prog}: unknown option {name}\n  {hint}")

    def option_strings(self) -> list[str]:
        return sorted(option for option in self._option_string_actions if option not in ("-h", "--help"))


class _Formatter(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        """`-o, --output {text,json}`, as newer versions of Python have it."""
        if not action.option_strings or action.nargs == 0:
            return super()._format_action_invocation(action)
        metavar = self._format_args(action, self._get_default_metavar_for_optional(action))
        return f"{', '.join(action.option_strings)} {metavar}"


def add_output(parser: argparse.ArgumentParser) -> None:
    """`-o json`, everywhere data comes out."""
    parser.add_argument(
        "-o", "--output", choices=("text", "json"), default="text", help="text for people, json for programs"
    )


def count(text: str) -> int:
    """A type for counts from 0 up."""
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise argparse.ArgumentTypeError(f"a count from 0 up is expected, not {text!r}")
    return int(text)


def amount(text: str) -> float:
    """A type for prices: `2.5` or `$2.5`."""
    try:
        value = float(text.lstrip("$"))
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e6:
        raise argparse.ArgumentTypeError(f"an amount such as 2.50 is expected, not {text!r}")
    return value
