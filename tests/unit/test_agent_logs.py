"""Reading logs by offset, and the cap that keeps offsets valid."""

from pathlib import Path

import pytest

from racimo.agent.logs import enforce_cap, read_log

CAP_BYTES = 64 * 1024


def write_lines(path: Path, count: int) -> bytes:
    content = b"".join(b"line %06d of a log that grows and grows\n" % number for number in range(count))
    path.write_bytes(content)
    return content


def test_a_log_is_read_from_an_offset_or_from_its_end(tmp_path: Path) -> None:
    path = tmp_path / "out.log"
    path.write_bytes(b"0123456789")
    assert read_log(path, 4, 3) == (4, b"456")
    assert read_log(path, -3, 100) == (7, b"789")
    assert read_log(path, -30, 100) == (0, b"0123456789")
    assert read_log(path, 10, 100) == (10, b"")
    assert read_log(tmp_path / "none", 0, 100) == (0, b"")


def test_a_small_log_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "out.log"
    content = write_lines(path, 10)
    assert enforce_cap(path, CAP_BYTES) == 0
    assert path.read_bytes() == content


def test_beyond_the_cap_the_oldest_part_goes_and_offsets_stay(tmp_path: Path) -> None:
    path = tmp_path / "out.log"
    content = write_lines(path, 10_000)
    try:
        freed = enforce_cap(path, CAP_BYTES)
    except OSError as error:
        pytest.skip(f"this file system punches no holes: {error}")
    assert freed > len(content) / 2
    assert path.stat().st_size == len(content), "offsets stay valid"
    assert path.stat().st_blocks * 512 <= CAP_BYTES
    begin, kept = read_log(path, 0, len(content))
    first, _, rest = kept.partition(b"\n")
    assert first.startswith(b"[racimo: the oldest ") and b"were dropped]" in first
    assert rest == content[begin + len(first) + 1 :]
    assert rest.startswith(b"line "), "no half line is left"


def test_the_cap_can_strike_again(tmp_path: Path) -> None:
    path = tmp_path / "out.log"
    content = write_lines(path, 10_000)
    try:
        enforce_cap(path, CAP_BYTES)
    except OSError as error:
        pytest.skip(f"this file system punches no holes: {error}")
    with open(path, "ab") as file:
        file.write(content)
    assert enforce_cap(path, CAP_BYTES) > 0
    assert read_log(path, -len(b"grows\n"), 100)[1] == b"grows\n"
