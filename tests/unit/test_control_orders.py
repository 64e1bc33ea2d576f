"""What runs are called, and which rank a worker is shown with."""

import pytest
from decide_stage import Stage, node

from racimo.control.orders import run_name
from racimo.control.present import worker_view
from racimo.spec.run import RunSpec


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("python slow.py --lr 3", "slow"),
        ("/usr/bin/python3.12 -u -X dev src/My_Job.py", "my-job"),
        ("python -m pkg.tool x", "pkg-tool"),
        ("bash -o pipefail prepare.sh", "prepare"),
        ("python -c print(1)", "python"),
        ("sh -c ./x.sh", "sh"),
        ("python", "python"),
        ("./build.sh python x.py", "build-sh"),
        ("nvidia-smi", "nvidia-smi"),
    ],
)
def test_a_command_is_called_by_its_program_or_the_interpreters_script(command: str, name: str) -> None:
    assert run_name(RunSpec(command=tuple(command.split(" ")))) == name


def test_no_two_workers_are_shown_with_one_rank() -> None:
    """One that died and was replaced has no rank any more: the replacement's may be the number it had."""
    stage = Stage(node(3))
    run = stage.elastic("2..3")
    assert [worker_view(stage.run(run), worker).rank for worker in stage.run(run).workers.values()] == [0, 1, 2]
    stage.exit(run, 0, "killed")
    stage.ready(run, 3)
    ranks = {w.index: worker_view(stage.run(run), w).rank for w in stage.run(run).workers.values()}
    assert ranks == {0: None, 1: 0, 2: 1, 3: 2}
    for index in (1, 3, 2):
        stage.exit(run, index, "finished")
    assert stage.run(run).status == "succeeded"
    assert {w.index: worker_view(stage.run(run), w).rank for w in stage.run(run).workers.values()} == ranks
