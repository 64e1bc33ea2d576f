"""What can be known about a training script before it runs: is it there, does it parse, are its modules here."""

import ast
import importlib.util
from pathlib import Path

from racimo.state.nouns import Failure

MAX_NAMED_MODULES = 10


def find_missing_modules(source: ast.Module) -> list[tuple[str, int]]:
    """(top-level package, line) of unconditional imports that this interpreter cannot find, in order.

    Only statements at the top of the module count: one inside `try`, `if` or a function may never run.
    """
    missing: dict[str, int] = {}
    for statement in source.body:
        if isinstance(statement, ast.Import):
            names = [alias.name for alias in statement.names]
        elif isinstance(statement, ast.ImportFrom) and not statement.level and statement.module:
            names = [statement.module]
        else:
            continue
        for name in names:
            package = name.partition(".")[0]
            if not _is_importable(package):
                missing.setdefault(package, statement.lineno)
    return list(missing.items())


def _is_importable(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ValueError:
        return True  # already imported, without a spec of its own (`__main__`)


def check_script(path: Path, shown: str, host: str) -> Failure | None:
    """Why the script cannot run on this machine, or None. `sys.path` must be the script's already."""
    try:
        source = ast.parse(path.read_bytes(), filename=shown)
    except FileNotFoundError:
        return Failure(code="file-missing", message=f"there is no {shown} among the run's files on {host}")
    except (SyntaxError, ValueError):
        return None  # raised again, and shown as Python shows it, when it is compiled
    missing = find_missing_modules(source)
    if not missing:
        return None
    places = ", ".join(f"{name!r} ({shown}:{line})" for name, line in missing[:MAX_NAMED_MODULES])
    packages = " ".join(name for name, _ in missing[:MAX_NAMED_MODULES])
    noun = "module" if len(missing) == 1 else f"{len(missing)} modules"
    return Failure(
        code="module-missing",
        message=f"{host} lacks the {noun} {places}",
        hint=f"put {packages} into a requirements.txt and pass --env requirements.txt",
    )
