"""What can be known about a training script before it runs: is it there, does it parse, are its modules here."""

import ast
import importlib.util
import os
from collections.abc import Callable
from pathlib import Path

from racimo.state.nouns import Failure

HARMLESS_CALLS = frozenset({"print", "len", "str", "int", "float", "bool", "list", "dict", "tuple", "set", "range"})
MAX_NAMED_MODULES = 10
PATH_NAMES = frozenset({"path", "meta_path", "path_hooks", "path_importer_cache", "modules", "site", "importlib"})
"""What, as an attribute or an imported name, may be a way to change where modules are found."""


def find_missing_modules(source: ast.Module, folder: str = "") -> list[tuple[str, int]]:
    """(top-level package, line) of `early_imports` that this interpreter cannot find, in order. `folder`: the
    script's own."""
    imports = early_imports(source, lambda package: _is_own(package, folder))
    return [(package, line) for package, line in imports.items() if not _is_importable(package)]


def early_imports(source: ast.Module, is_own: Callable[[str], bool]) -> dict[str, int]:
    """The line of each top-level package that a script is certain to import.

    Only statements at the top of the module count: one inside `try`, `if` or a function may never run. And only those
    before anything that may change where modules are found; what is missing behind it, Python says itself.
    `is_own`: whether a module lies in the script's folder; it is code of the user's and may change that as well.
    """
    found: dict[str, int] = {}
    for statement in source.body:
        for name in _imported(statement):
            found.setdefault(name.partition(".")[0], statement.lineno)
        if _may_change_imports(statement, is_own):
            break
    return found


def _imported(statement: ast.AST) -> list[str]:
    if isinstance(statement, ast.Import):
        return [alias.name for alias in statement.names]
    if isinstance(statement, ast.ImportFrom) and not statement.level and statement.module:
        return [statement.module]
    return []


def _may_change_imports(statement: ast.stmt, is_own: Callable[[str], bool]) -> bool:
    """Whether running it can change what later imports find: any call (of more than `print` and the
    like) or decorator, a mention of `sys.path` and the
    like, a module of the user's own."""
    waiting: list[ast.AST] = [statement]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if node.decorator_list:
                return True
            waiting += [node.args, *([node.returns] if node.returns else [])]  # the body runs when it is called
            continue
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in HARMLESS_CALLS:
            waiting += [*node.args, *(keyword.value for keyword in node.keywords)]
            continue
        if isinstance(node, ast.Call | ast.Await) or (isinstance(node, ast.ClassDef) and node.decorator_list):
            return True
        if isinstance(node, ast.Attribute) and node.attr in PATH_NAMES:
            return True
        if isinstance(node, ast.ImportFrom) and any(
            alias.name in PATH_NAMES or alias.name == "*" for alias in node.names
        ):
            return True
        if isinstance(node, ast.ImportFrom) and node.level:
            return True
        if any(is_own(name.partition(".")[0]) for name in _imported(node)):
            return True
        waiting += ast.iter_child_nodes(node)
    return False


def _is_own(package: str, folder: str) -> bool:
    """Whether a module lies in the script's folder: a file, a package or a folder without `__init__.py`."""
    try:
        spec = importlib.util.find_spec(package)
    except ValueError:
        return False
    if spec is None or not folder:
        return False
    places = [*(spec.submodule_search_locations or ()), *([spec.origin] if spec.origin else [])]
    return any(Path(place).parent == Path(folder) for place in places)


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
    missing = find_missing_modules(source, os.fspath(path.parent))
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
