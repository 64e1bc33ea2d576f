"""What is wrong with a script is said before anything is sent, and before a cluster is even looked for."""

import subprocess
import sys
from pathlib import Path

import pytest

from racimo.client.prepare import prepare
from racimo.spec.errors import RacimoError
from racimo.spec.run import RunSpec


def refused(tmp_path: Path, **fields: object) -> RacimoError:
    with pytest.raises(RacimoError) as caught:
        prepare(RunSpec(**fields), tmp_path)  # type: ignore[arg-type]
    return caught.value


def test_a_script_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    error = refused(tmp_path, train="trian.py")
    assert error.code == "file-missing" and "trian.py" in error.message
    assert error.hint == "did you mean train.py?"


def test_a_folder_is_no_script(tmp_path: Path) -> None:
    (tmp_path / "train.py").mkdir()
    assert refused(tmp_path, train="train.py").code == "file-unreadable"


def test_a_syntax_error_is_shown_as_python_shows_it(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("def train(config):\n    x = (1,\n    return x\n")
    python = subprocess.run([sys.executable, "broken.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    error = refused(tmp_path, train="broken.py")
    assert error.code == "syntax-error"
    shown = python.stderr.strip("\n").replace(str(tmp_path) + "/", "")
    assert error.message.strip("\n") == shown


@pytest.mark.parametrize("content", [b"x = 1\0", b"# coding: klingon\n", b"\xff\xfe bad"])
def test_what_python_cannot_read_is_a_syntax_error(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "t.py").write_bytes(content)
    assert refused(tmp_path, train="t.py").code == "syntax-error"


@pytest.mark.parametrize(
    ("source", "function", "there"),
    [
        ("def train(c): pass", "train", True),
        ("train = lambda c: 1", "train", True),
        ("from other import train", "train", True),
        ("import train", "train", True),
        ("class train: pass", "train", True),
        ("if True:\n  def train(): pass\nelse:\n  train = None", "train", True),
        ("from other import *", "train", True),
        ("def outer():\n  def train(): pass", "train", False),
        ("class A:\n  def train(self): pass", "train", False),
        ("def trains(c): pass", "train", False),
    ],
)
def test_the_function_is_looked_up_without_running_the_script(
    source: str, function: str, there: bool, tmp_path: Path
) -> None:
    (tmp_path / "t.py").write_text(source)
    if there:
        prepare(RunSpec(train=f"t.py:{function}"), tmp_path)
    else:
        assert refused(tmp_path, train=f"t.py:{function}").code == "function-missing"


def test_the_closest_function_is_named(tmp_path: Path) -> None:
    (tmp_path / "t.py").write_text("def train(c): pass\ndef evaluate(c): pass")
    assert refused(tmp_path, train="t.py:trian").hint == "did you mean t.py:train?"
    assert refused(tmp_path, train="t.py:zzz").hint == "it defines: evaluate, train"


def test_the_lock_file_is_read_into_the_spec(tmp_path: Path) -> None:
    (tmp_path / "lock.txt").write_text("numpy==2.0\n")
    prepared = prepare(RunSpec(command=("true",), env="lock.txt"), tmp_path)
    assert prepared.spec.requirements == "numpy==2.0\n"
    assert refused(tmp_path, command=("true",), env="no.txt").code == "file-missing"


def test_a_script_in_a_folder_below_keeps_its_path(tmp_path: Path) -> None:
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "t.py").write_text("def f(c): pass")
    for spelled in ("jobs/t.py:f", "./jobs/t.py:f", f"{tmp_path}/jobs/t.py:f"):
        prepared = prepare(RunSpec(train=spelled), tmp_path)
        assert (prepared.spec.train, prepared.folder, prepared.moved) == ("jobs/t.py:f", tmp_path, False)


def test_a_script_elsewhere_is_sent_with_its_own_folder(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir(), there.mkdir()
    (there / "t.py").write_text("")
    prepared = prepare(RunSpec(train="../there/t.py"), here)
    assert (prepared.spec.train, prepared.folder, prepared.moved) == ("t.py", there, True)
    error = refused(here, train="../there/t.py", files="./sub")
    assert error.code == "file-missing" and error.hint == f"--files {there}"


def test_no_files_means_no_folder(tmp_path: Path) -> None:
    assert prepare(RunSpec(command=("true",), files=""), tmp_path).folder is None
