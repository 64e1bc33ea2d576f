"""What a user's exception becomes, and what is known before a script runs."""

import ast
from pathlib import Path

import pytest

from racimo.spec.errors import RacimoError
from racimo.worker.preflight import check_script, find_missing_modules
from racimo.worker.user_errors import failure_from


def raised(source: str, folder: Path) -> BaseException:
    path = str(folder / "train.py")
    try:
        exec(compile(source, path, "exec"), {})
    except BaseException as error:  # noqa: BLE001 - whatever it is, it is the subject
        return error
    raise AssertionError("nothing was raised")


def code_of(source: str, folder: Path) -> str:
    return failure_from(raised(source, folder), str(folder), 0, "r/1/0").code


def test_a_full_disk_behind_another_error_is_a_full_disk(tmp_path: Path) -> None:
    source = "try:\n    raise OSError(28, 'full')\nexcept OSError as e:\n    raise RuntimeError('save failed') from e"
    assert code_of(source, tmp_path) == "disk-full"


def test_an_allocation_that_fails_is_out_of_memory(tmp_path: Path) -> None:
    assert code_of("raise MemoryError", tmp_path) == "out-of-memory"
    assert code_of("raise RuntimeError('DefaultCPUAllocator: cannot allocate')", tmp_path) == "out-of-memory"
    assert code_of("raise RuntimeError('something else')", tmp_path) == "worker-raised"


def test_an_error_of_ours_keeps_code_and_hint_and_names_the_users_line(tmp_path: Path) -> None:
    source = (
        "from racimo.spec.errors import RacimoError\n"
        "def f():\n    raise RacimoError('not-exact', 'why', 'do this')\nf()"
    )
    failure = failure_from(raised(source, tmp_path), str(tmp_path), 2, "r/1/2")
    assert (failure.code, failure.hint, failure.rank) == ("not-exact", "do this", 2)
    assert failure.message == "why (train.py:3)"


def test_frames_above_the_users_are_left_out_and_those_of_libraries_below_kept(tmp_path: Path) -> None:
    failure = failure_from(raised("import json\njson.loads('{')", tmp_path), str(tmp_path), 0, "r/1/0")
    lines = failure.traceback.splitlines()
    assert lines[:2] == ["Traceback (most recent call last):", '  File "train.py", line 2, in <module>']
    assert any("json/decoder.py" in line for line in lines)
    assert "test_worker_errors" not in failure.traceback


def test_an_error_of_ours_without_a_users_frame_has_no_traceback(tmp_path: Path) -> None:
    failure = failure_from(RacimoError("function-missing", "no f"), str(tmp_path), 0, "r/1/0")
    assert "Traceback" not in failure.traceback


def test_only_unconditional_imports_at_the_top_count() -> None:
    source = """
import os, absent_one
from absent_two.sub import x
from . import sibling
try:
    import absent_three
except ImportError:
    pass
def f():
    import absent_four
"""
    assert find_missing_modules(ast.parse(source)) == [("absent_one", 2), ("absent_two", 3)]


def test_a_missing_script_is_named(tmp_path: Path) -> None:
    failure = check_script(tmp_path / "gone.py", "gone.py", "host")
    assert failure is not None and failure.code == "file-missing" and "gone.py" in failure.message


@pytest.mark.parametrize("source", ["x = (\n", "import os\n"])
def test_a_script_that_does_not_parse_or_lacks_nothing_passes(tmp_path: Path, source: str) -> None:
    (tmp_path / "train.py").write_text(source)
    assert check_script(tmp_path / "train.py", "train.py", "host") is None


def message_of(error: BaseException) -> str:
    return failure_from(error, "/nowhere", 0, "r/1/0").message


def test_a_long_message_is_known_by_its_first_line() -> None:
    """What torch says of wrong arguments ends in ` * (tuple of ints dim, bool keepdim)`, which means nothing."""
    long = TypeError("sum() received an invalid combination of arguments, expected one of:\n * (int dim)\n * ()\n")
    assert message_of(long) == "TypeError: sum() received an invalid combination of arguments, expected one of: …"
    assert message_of(ValueError("\n  first\n  second")) == "ValueError: first …"
    assert message_of(ValueError("one line\n")) == "ValueError: one line"
    assert message_of(KeyError()) == "KeyError"


def test_a_syntax_error_is_known_by_what_it_is(tmp_path: Path) -> None:
    assert message_of(raised("exec('x = (')", tmp_path)).startswith("SyntaxError: '(' was never closed")


def test_of_an_error_in_a_data_loading_process_the_one_inside_counts() -> None:
    text = (
        "Caught ValueError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n"
        '  File "x.py", line 1, in f\n    g()\nValueError: no such picture\n'
    )
    assert message_of(ValueError(text)) == "ValueError: no such picture"


FETCH = """
from racimo.worker.train.batches import Batches, Key
class Data:
    def __len__(self):
        return 4
    def __getitem__(self, index):
        raise ValueError('no such picture')
Batches({data}, 4).fetch(Key(0, 0, (9,)))
"""


def test_our_frames_between_the_users_are_left_out(tmp_path: Path) -> None:
    failure = failure_from(raised(FETCH.format(data="Data()"), tmp_path), str(tmp_path), 0, "r/1/0")
    assert [line.split(",")[0].strip() for line in failure.traceback.splitlines() if "File" in line] == [
        'File "train.py"',
        'File "train.py"',
    ]
    assert failure.traceback.endswith("ValueError: no such picture\n")


def test_our_frame_stays_where_it_raised_what_is_not_of_our_making(tmp_path: Path) -> None:
    failure = failure_from(raised(FETCH.format(data="[1, 2, 3, 4]"), tmp_path), str(tmp_path), 0, "r/1/0")
    assert "self.dataset[index]" in failure.traceback
    assert failure.traceback.count('File "') == 2
