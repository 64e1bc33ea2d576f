"""Exit records: once, whole, and named by the machine's own numbers."""

import errno
import os
import signal
from pathlib import Path

import pytest

from racimo.agent import verdict
from racimo.agent.exits import exit_from_status, link_once, read_exit, write_exit
from racimo.agent.launching import choose_port
from racimo.agent.processes import ProcessRecord, is_alive, record_of
from racimo.agent.verdict import name_failure, refuse_early_end
from racimo.state.nouns import Exit, Failure


def test_the_first_record_wins(tmp_path: Path) -> None:
    assert write_exit(tmp_path, Exit(outcome="failed", code=3))
    assert not write_exit(tmp_path, Exit(outcome="finished", code=0))
    assert read_exit(tmp_path) == Exit(outcome="failed", code=3)
    assert [path.name for path in tmp_path.iterdir()] == ["exit.json"]


def test_no_record_is_none(tmp_path: Path) -> None:
    assert read_exit(tmp_path) is None


def test_a_full_disk_gives_up_the_ballast(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ballast = tmp_path / "ballast"
    ballast.write_bytes(b"x")
    real = Path.write_bytes

    def write(path: Path, data: bytes) -> int:
        if ballast.exists():
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(path, data)

    monkeypatch.setattr(Path, "write_bytes", write)
    assert link_once(tmp_path / "exit.json", b"{}", ballast)
    assert not ballast.exists()


@pytest.mark.parametrize(
    ("status", "expected"),
    [(0, ("finished", 0, None)), (3 << 8, ("failed", 3, None)), (signal.SIGKILL, ("killed", None, 9))],
)
def test_wait_statuses_become_exits(status: int, expected: tuple[object, ...]) -> None:
    exit = exit_from_status(status, 1.5)
    assert (exit.outcome, exit.code, exit.signal) == expected and exit.held_s == 1.5


def test_a_sigkill_while_the_kernel_killed_for_memory_is_named(tmp_path: Path) -> None:
    killed = Exit(outcome="killed", signal=9)
    assert name_failure(killed, tmp_path, "host", 0) == killed
    named = name_failure(killed, tmp_path, "host", 1).failure
    assert named is not None and named.code == "out-of-memory" and "host" in named.message


def test_a_failure_on_a_full_disk_is_named_with_what_was_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verdict, "free_disk_bytes", lambda path: 1_000)
    named = name_failure(Exit(outcome="failed", code=2), tmp_path, "host", 0).failure
    assert named is not None and named.code == "disk-full" and "1.0 kB" in named.message


def test_a_failure_that_has_a_name_keeps_it(tmp_path: Path) -> None:
    named = Exit(outcome="failed", code=1, failure=Failure(code="worker-raised", message="m"))
    assert name_failure(named, tmp_path, "host", 5) is named


def test_an_end_with_code_zero_inside_the_loop_is_a_failure(tmp_path: Path) -> None:
    done = Exit(outcome="finished", code=0)
    assert refuse_early_end(done, tmp_path, "r/1/2", 1) is done
    (tmp_path / "in-steps").touch()
    early = refuse_early_end(done, tmp_path, "r/1/2", 1)
    assert (early.outcome, early.code) == ("failed", 0)
    assert early.failure is not None and early.failure.code == "worker-left-early"
    assert (early.failure.rank, early.failure.worker) == (1, "r/1/2")
    killed = Exit(outcome="killed", signal=9)
    assert refuse_early_end(killed, tmp_path, "r/1/2", 1) is killed


def test_a_reused_pid_is_not_the_same_process() -> None:
    record = record_of(os.getpid(), "me", 0.0)
    assert record is not None and is_alive(record)
    other = ProcessRecord(pid=record.pid, start_ticks=record.start_ticks - 1, boot=record.boot)
    rebooted = ProcessRecord(pid=record.pid, start_ticks=record.start_ticks, boot="another boot")
    assert not is_alive(other) and not is_alive(rebooted)


def test_a_rendezvous_finds_a_free_port_that_nobody_else_has() -> None:
    first = choose_port("run/1", set())
    assert choose_port("run/1", set()) == first
    assert choose_port("run/1", {first}) != first


def test_a_message_with_half_a_surrogate_pair_is_kept_as_an_escape(tmp_path: Path) -> None:
    failure = Failure(code="worker-raised", message="ValueError: red\udcff", traceback="...\udcff\x00", rank=1)
    assert write_exit(tmp_path, Exit(outcome="failed", code=1, failure=failure))
    kept = read_exit(tmp_path)
    assert kept is not None and kept.failure is not None
    assert (kept.failure.code, kept.failure.rank) == ("worker-raised", 1)
    assert kept.failure.message == r"ValueError: red\udcff"
    assert kept.failure.traceback == "...\\udcff\x00"
