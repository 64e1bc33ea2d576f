"""What can be checked before anything is sent: the script is Python, its function exists, the lock file is read."""

import ast
import os
import sys
import traceback
import warnings
from pathlib import Path

import msgspec

from racimo.spec.build import closest
from racimo.spec.errors import RacimoError
from racimo.spec.run import RunSpec

MAX_SCRIPT_BYTES = 10 * 10**6
MAX_REQUIREMENTS_BYTES = 10**6


class Prepared(msgspec.Struct, frozen=True, kw_only=True):
    """The spec as it goes to the cluster, and the folder whose files go with it (None: no files).

    `moved`: the script lies outside the folder it was submitted from, so its own folder is sent instead."""

    spec: RunSpec
    folder: Path | None
    moved: bool = False


def prepare(spec: RunSpec, root: Path | None = None) -> Prepared:
    """Paths in the spec are below `root` (default: the current folder).

    Raises `file-missing`, `file-unreadable`, `syntax-error` (the message is Python's own) and `function-missing`."""
    root = Path.cwd() if root is None else root.absolute()
    folder = Path(os.path.normpath(root / spec.files)) if spec.files else None
    moved = False
    changes: dict[str, str] = {}
    if spec.train_file:
        script = Path(os.path.normpath(root / spec.train_file))
        check_script(script, spec.train_function, shown=spec.train_file)
        place = str(script)
        if folder is not None:
            folder, place, moved = _place(script, folder, spec)
        changes[spec.kind] = f"{place}:{spec.train_function}" if spec.train_function else place
    if spec.env:
        changes["requirements"] = _read_text(root / spec.env, spec.env, MAX_REQUIREMENTS_BYTES)
    return Prepared(spec=msgspec.structs.replace(spec, **changes), folder=folder, moved=moved)


def _place(script: Path, folder: Path, spec: RunSpec) -> tuple[Path, str, bool]:
    """The folder to send, where in it the script is, and whether that is another folder than asked."""
    if script.is_relative_to(folder):
        return folder, script.relative_to(folder).as_posix(), False
    real_script, real_folder = Path(os.path.realpath(script)), Path(os.path.realpath(folder))
    if real_script.is_relative_to(real_folder):
        return folder, real_script.relative_to(real_folder).as_posix(), False
    if spec.files == ".":
        return script.parent, script.name, True
    raise RacimoError(
        "file-missing",
        f"{spec.train_file} is not inside the folder that is sent, {folder}",
        f"--files {script.parent}",
    )


def check_script(path: Path, function: str, *, shown: str) -> None:
    """`shown` is the path as the user wrote it."""
    source = _read_bytes(path, shown, MAX_SCRIPT_BYTES)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they belong to the run, where they will show once
            compile(source, shown, "exec", dont_inherit=True)
            tree = ast.parse(source, shown)
    except SyntaxError as error:
        python_says = "".join(traceback.format_exception_only(error)).rstrip()
        raise RacimoError("syntax-error", python_says) from None
    except ValueError as error:  # a NUL byte, in older versions of Python
        raise RacimoError("syntax-error", f'  File "{shown}"\nSyntaxError: {error}') from None
    except RecursionError:
        raise RacimoError("syntax-error", f"{shown} is nested too deeply for Python {sys.version.split()[0]}") from None
    if function:
        names, complete = module_names(tree)
        if function not in names and complete:
            near = closest(function, names)
            listed = ", ".join(sorted(names)[:10]) or "none"
            hint = f"did you mean {shown}:{near}?" if near else f"it defines: {listed}"
            raise RacimoError("function-missing", f"{shown} defines no {function}", hint)


def module_names(tree: ast.Module) -> tuple[set[str], bool]:
    """What a module binds at its top level, and whether that is all (False after `from x import *`)."""
    names: set[str] = set()
    complete = True
    waiting: list[ast.AST] = list(tree.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            complete = complete and all(alias.name != "*" for alias in node.names)
            names.update((alias.asname or alias.name).split(".")[0] for alias in node.names)
        elif isinstance(node, ast.Lambda):
            continue
        else:
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            waiting.extend(ast.iter_child_nodes(node))
    return names, complete


def _read_bytes(path: Path, shown: str, limit: int) -> bytes:
    try:
        with open(path, "rb") as file:
            content = file.read(limit + 1)
    except FileNotFoundError:
        raise RacimoError("file-missing", f"{shown} does not exist (looked for {path})", _similar_file(path)) from None
    except IsADirectoryError:
        raise RacimoError("file-unreadable", f"{shown} is a folder, not a file") from None
    except OSError as error:
        raise RacimoError("file-unreadable", f"cannot read {shown}: {error.strerror}", f"ls -l {path}") from None
    if len(content) > limit:
        raise RacimoError("file-unreadable", f"{shown} is larger than {limit // 10**6} MB")
    return content


def _similar_file(path: Path) -> str:
    """Judged by the stem: that two names end in `.py` makes them no more alike."""
    try:
        names = os.listdir(path.parent)  # noqa: PTH208 - names alone are needed
    except OSError:
        return ""
    stems = {Path(name).stem: name for name in names if Path(name).suffix == path.suffix}
    near = stems.get(closest(path.stem, stems))
    return f"did you mean {near}?" if near else ""


def _read_text(path: Path, shown: str, limit: int) -> str:
    try:
        return _read_bytes(path, shown, limit).decode()
    except UnicodeDecodeError as error:
        raise RacimoError("file-unreadable", f"{shown} is not UTF-8 text: {error.reason}") from None
