"""A module is called missing only where nothing before its import can have changed where modules are found."""

import ast
import sys
from pathlib import Path

import pytest

from racimo.worker.preflight import check_script, find_missing_modules


@pytest.mark.parametrize(
    "before",
    [
        "import os, sys\nsys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), 'src'))",
        "import sys\nsys.path += ['src']",
        "import sys\nif 'src' not in sys.path:\n    sys.path = ['src', *sys.path]",
        "from sys import path\npath[:0] = ['src']",
        "import sys\nsys.meta_path[0:0] = [1]",
        "import site\nsite.addsitedir('src')",
        "import os\nos.chdir('src')",
        "def set_up():\n    import sys\n    sys.path.insert(0, 'src')\nset_up()",
        "def now(f):\n    return f()\n@now\ndef done():\n    import sys\n    sys.path.insert(0, 'src')",
        "class A:\n    import sys\n    sys.path += ['src']",
        "import sys\nsys.modules['absent_mylib'] = sys",
        "try:\n    import paths_of_mine\nexcept ImportError:\n    pass",
        "import paths_of_mine",
        "import folder_of_mine.paths",
    ],
)
def test_imports_behind_what_may_change_the_path_are_left_to_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str
) -> None:
    (tmp_path / "paths_of_mine.py").write_text("import sys\nsys.path.insert(0, 'src')\n")
    (tmp_path / "folder_of_mine").mkdir()
    (tmp_path / "folder_of_mine" / "paths.py").touch()
    (tmp_path / "train.py").write_text(f"{before}\nimport absent_mylib\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    assert check_script(tmp_path / "train.py", "train.py", "host") is None


@pytest.mark.parametrize(
    "before",
    [
        '"""What it does."""\nfrom __future__ import annotations\nimport os, json\nN = 3\nHOME = os.environ["HOME"]',
        "def later(n=3):\n    import sys\n    sys.path.insert(0, 'src')",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import absent_types",
        "try:\n    import absent_accelerator\nexcept ImportError:\n    absent_accelerator = None",
    ],
)
def test_what_cannot_change_the_path_hides_no_missing_module(before: str) -> None:
    source = f"{before}\nimport absent_mylib\n"
    assert find_missing_modules(ast.parse(source)) == [("absent_mylib", source.count("\n"))]
