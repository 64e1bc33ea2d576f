"""Who hangs, and who only waits."""

import asyncio
from pathlib import Path

import pytest

from racimo.agent.entry import Entry
from racimo.agent.hangs import describe_hang, find_hung, find_user_line, main_stack, note_phases
from racimo.agent.inotify import FileWatcher
from racimo.agent.phases import PhaseNote, read_phase
from racimo.agent.protocol import Announce, Member, Progress, WorkerOrder
from racimo.state.nouns import Exit

STACKS = """Thread 0x00007f01 (most recent call first):
  File "/venv/lib/torch/autograd.py", line 3 in backward
  File "/run/files/data.py", line 9 in fetch

Current thread 0x00007f02 (most recent call first):
  File "/venv/lib/threading.py", line 320 in wait
  File "/run/files/model/net.py", line 42 in forward
  File "/run/files/train.py", line 7 in train
  File "/venv/lib/racimo/worker/bootstrap.py", line 140 in _execute
  File "/venv/lib/racimo/agent/zygote.py", line 90 in main
"""


def entry(index: int, phase: str, since_s: float, *, waits_for: tuple[int, ...] = (), step_s: float = 0.1) -> Entry:
    order = WorkerOrder(worker=f"r/1/{index}", kind="train", rank=index, hang_after_s=60.0)
    made = Entry(order=order, directory=Path("/nowhere"))
    made.progress = Progress(worker=order.worker, phase=phase, phase_number=5, waits_for=waits_for, step_s=step_s)
    made.progress_at_s = 1000.0 - since_s
    return made


def hung(*entries: Entry) -> list[int]:
    return [found.index for found in find_hung(entries, 1000.0)]


def test_a_worker_that_computes_for_too_long_hangs_and_those_that_wait_do_not() -> None:
    assert hung(entry(0, "exchange", 80, waits_for=(1,)), entry(1, "compute", 80)) == [1]


def test_within_the_limit_nobody_hangs() -> None:
    assert hung(entry(0, "exchange", 50, waits_for=(1,)), entry(1, "compute", 50)) == []


def test_slow_steps_are_not_hangs() -> None:
    assert hung(entry(0, "compute", 80, step_s=10.0)) == []
    assert hung(entry(0, "compute", 101, step_s=10.0)) == [0]


@pytest.mark.parametrize("phase", ["starting", "done"])
def test_some_phases_may_take_for_ever(phase: str) -> None:
    assert hung(entry(0, phase, 10_000)) == []


def test_if_all_wait_those_waited_for_are_named() -> None:
    assert hung(entry(0, "exchange", 80, waits_for=(2,)), entry(1, "wait", 80, waits_for=(2,)),
                entry(2, "exchange", 80, waits_for=())) == [2]  # fmt: skip


def test_who_waits_for_a_worker_on_another_node_does_not_hang() -> None:
    """pytorch#118369: the agent of the one that is stuck names it, not those of the nodes that wait for it."""
    waiting = (entry(0, "exchange", 100, waits_for=(2,)), entry(1, "exchange", 100, waits_for=(2,)))
    assert hung(*waiting) == []
    assert hung(*waiting, entry(3, "compute", 10)) == []


def test_who_waits_for_others_to_be_started_does_not_hang() -> None:
    """Their node may have to build the environment first, for minutes."""
    assert hung(entry(0, "wait", 10_000)) == []


def noting(root: Path, one: Entry, number: int, phase: str) -> Entry:
    one.directory = root / str(one.index)
    one.directory.mkdir(exist_ok=True)
    note = PhaseNote(one.directory)
    note.write(number, phase)
    note.close()
    return one


def test_a_worker_that_could_not_tell_its_phase_any_more_is_judged_by_its_own_note(tmp_path: Path) -> None:
    """nccl#1324: code in C with the interpreter's lock stops the thread that tells; what was told last is long over."""
    stuck = noting(tmp_path, entry(1, "exchange", 80, waits_for=(0,)), 6, "compute")
    waits = noting(tmp_path, entry(0, "exchange", 80, waits_for=(1,)), 5, "exchange")
    for now_s in (920.0, 921.0, 923.0, 1000.0):
        note_phases((stuck, waits), now_s)
    assert stuck.progress is not None and stuck.progress.phase == "compute" and not stuck.progress.waits_for
    assert hung(stuck, waits) == [1]
    assert read_phase(tmp_path) is None


def test_a_worker_whose_link_is_slow_but_whose_note_goes_on_does_not_hang(tmp_path: Path) -> None:
    slow = entry(0, "compute", 80)
    for second in range(80):
        noting(tmp_path, slow, 6 + second, "compute")
        note_phases((slow,), 920.0 + second)
        assert slow.progress is not None and slow.progress.phase_number == 5
    assert hung(slow) == []


def test_if_nobody_was_named_in_twice_the_time_one_who_waits_is() -> None:
    assert hung(entry(0, "exchange", 130, waits_for=(2,)), entry(1, "exchange", 125, waits_for=(2,))) == [0]
    assert hung(entry(0, "exchange", 130, waits_for=(2,)), entry(1, "compute", 10)) == []


def test_the_failure_names_who_waits_and_who_is_waited_for(tmp_path: Path) -> None:
    stuck, waits = entry(1, "compute", 80), entry(0, "exchange", 80, waits_for=(1, 5))
    members = tuple(Member(f"r/1/{index}", "") for index in (0, 1, 5))
    generation = Announce(run="r", attempt=1, number=3, members=members, reason="")

    async def described(one: Entry) -> str:
        files = FileWatcher()
        try:
            return (await describe_hang(one, (stuck, waits), generation, files, tmp_path)).message
        finally:
            files.close()

    assert "while rank 0 waits for it" in asyncio.run(described(stuck))
    assert asyncio.run(described(waits)).endswith("waiting for ranks 1, 2")


def test_if_one_still_goes_on_waiting_is_no_hang() -> None:
    assert hung(entry(0, "exchange", 80, waits_for=(1,)), entry(1, "compute", 10)) == []


def test_a_hang_is_told_once_per_phase() -> None:
    told = entry(0, "compute", 80)
    told.hung_phase = 5
    assert hung(told) == []


def test_dead_and_frozen_workers_do_not_hang() -> None:
    dead, frozen = entry(0, "compute", 80), entry(1, "compute", 80)
    dead.exit, frozen.frozen = Exit(outcome="finished"), True
    assert hung(dead, frozen) == []


def test_the_line_is_the_innermost_of_the_users_in_the_signalled_thread() -> None:
    assert find_user_line(STACKS, Path("/run/files")) == "model/net.py:42 in forward"
    assert find_user_line(STACKS, Path("/elsewhere")) == ""


def test_the_stack_shown_is_the_main_threads_down_to_the_users_first_frame() -> None:
    assert main_stack(STACKS, Path("/run/files")).splitlines() == [
        "Stack of its main thread (most recent call first):",
        '  File "/venv/lib/threading.py", line 320 in wait',
        '  File "model/net.py", line 42 in forward',
        '  File "train.py", line 7 in train',
    ]


def test_a_stack_without_the_users_files_or_without_a_signalled_thread_is_still_shown() -> None:
    assert "zygote.py" in main_stack(STACKS, Path("/elsewhere"))
    unsignalled = STACKS.replace("Current thread", "Thread")
    assert 'File "train.py", line 7' in main_stack(unsignalled, Path("/run/files")).splitlines()[-1]
    assert main_stack("", Path("/run/files")) == ""
