"""`racimo secret`: values come from stdin or a hidden prompt, never from the command line, where others could read."""

import argparse
import sys

from racimo.cli.console import talk, write, write_json
from racimo.cli.parser import add_output
from racimo.cli.usage import UsageError
from racimo.spec.errors import RacimoError

MAX_SECRET_BYTES = 64 * 1024


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "racimo secret set NAME < FILE | racimo secret list | racimo secret rm NAME"
    parser.description = "Values that reach workers as environment variables, are never journalled nor shown in logs."
    parser.add_argument("what", choices=("set", "list", "rm"))
    parser.add_argument("name", metavar="NAME", nargs="?", default="", help="also the environment variable's name")
    add_output(parser)


def _secret(args: argparse.Namespace) -> int:
    from racimo.client import Client

    if args.what != "list" and not args.name:
        raise UsageError(f"racimo secret {args.what}: no NAME\n  racimo secret {args.what} API_KEY")
    if "=" in args.name:
        raise UsageError(
            "racimo secret: a value on the command line could be read by others; give the name alone and the value "
            "on stdin"
        )
    if args.what == "list":
        with Client(say=talk, may_start=False) as client:
            names = client.secrets()
        if args.output == "json":
            write_json(names)
        for name in names if args.output == "text" else ():
            write(name)
        return 0
    value = _read_value(args.name) if args.what == "set" else ""
    with Client(say=talk, may_start=args.what == "set") as client:
        if args.what == "set":
            client.set_secret(args.name, value)
            talk(f"{args.name} is set; runs that name it get it: --secret {args.name}")
        else:
            client.remove_secret(args.name)
            talk(f"{args.name} is removed")
    return 0


def _read_value(name: str) -> str:
    if sys.stdin.isatty():
        import getpass

        try:
            value = getpass.getpass(f"value of {name} (not shown): ")
        except (KeyboardInterrupt, EOFError):
            print(file=sys.stderr)  # the prompt's line ends here
            raise KeyboardInterrupt from None
    else:
        value = sys.stdin.read(MAX_SECRET_BYTES + 1)
        value = value.removesuffix("\n")  # what `echo` added
    if not value:
        raise RacimoError("invalid-request", f"the value of {name} is empty", f"racimo secret set {name} < FILE")
    if len(value) > MAX_SECRET_BYTES:
        raise RacimoError("invalid-request", f"the value of {name} has more than {MAX_SECRET_BYTES} characters")
    return value


COMMANDS = {"secret": (_arguments, _secret)}
