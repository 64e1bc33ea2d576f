"""kill -9 of agent, zygote and shim in the middle of work: every exit is still recorded, once, and nothing is left.

horovod#3399, ray#41437: what was given up for dead runs on, or starts later all the same.
"""

import os
import select
import signal
import time
from collections.abc import Iterator

import pytest
from agent_harness import RealAgent

from racimo.agent.processes import ProcessRecord, children_of, is_alive, start_ticks
from racimo.agent.protocol import ControlWelcome, StartReply, StartWorker, StopWorker, WorkerOrder
from racimo.state.events import WorkerExited

pytestmark = pytest.mark.e2e
SLOW_COMMAND = ("sh", "-c", "echo begin >> $RACIMO_OUTPUT_DIR/times; echo up; sleep 1; exit 6")


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealAgent]:
    real = RealAgent(tmp_path_factory.mktemp("agent") / "home")
    yield real
    real.close()


def wait_for_death(record: ProcessRecord) -> None:
    pidfd = os.pidfd_open(record.pid)
    os.kill(record.pid, signal.SIGKILL)
    assert select.select([pidfd], [], [], 10)[0]
    os.close(pidfd)
    assert not is_alive(record)


def welcome(agent: RealAgent) -> ControlWelcome:
    return agent.client.welcome


def test_a_new_agent_finds_the_workers_of_the_old_one(agent: RealAgent) -> None:
    agent.run("long/1/0", *SLOW_COMMAND)
    agent.wait_for_line("long/1/0", "up")
    pid, instance = agent.started("long/1/0"), welcome(agent).instance
    agent.kill_agent()
    agent.restart()
    assert welcome(agent).instance != instance
    assert [(state.worker, state.pid, state.exited) for state in welcome(agent).workers] == [("long/1/0", pid, False)]
    exit = agent.exit("long/1/0")
    assert (exit.outcome, exit.code) == ("failed", 6)
    assert 1.0 < exit.held_s < 10


def test_an_exit_while_no_agent_lives_is_told_by_the_next(agent: RealAgent) -> None:
    agent.run("away/1/0", *SLOW_COMMAND)
    agent.wait_for_line("away/1/0", "up")
    agent.kill_agent()
    time.sleep(1.5)  # the command ends meanwhile, and only the zygote sees it
    agent.restart()
    assert agent.exit("away/1/0").code == 6
    # Told again to a control process that lost its cursor, but never under another number.
    told = [numbered for numbered in agent.events if isinstance(numbered.event, WorkerExited)]
    agent.kill_agent()
    agent.restart()
    agent.events.clear()
    agent.run("next/1/0", "true")
    agent.exit("next/1/0")
    exits = [numbered for numbered in agent.events if isinstance(numbered.event, WorkerExited)]
    assert len(exits) >= 1 and all(number in told or number.event.run == "next" for number in exits)


def test_a_command_outlives_its_zygote_and_its_exit_is_recorded(agent: RealAgent) -> None:
    agent.run("orphan/1/0", *SLOW_COMMAND)
    agent.wait_for_line("orphan/1/0", "up")
    wait_for_death(agent.record("zygote-plain"))
    assert agent.exit("orphan/1/0").code == 6
    assert all(start_ticks(pid) is not None for pid in children_of(agent.process.pid)), "no zombie is left"
    agent.run("again/1/0", "echo", "hi")  # a new zygote is there
    assert agent.exit("again/1/0").code == 0


def test_a_command_outlives_zygote_and_agent_together(agent: RealAgent) -> None:
    agent.run("both/1/0", *SLOW_COMMAND)
    agent.wait_for_line("both/1/0", "up")
    zygote = agent.record("zygote-plain")
    agent.kill_agent()
    wait_for_death(zygote)
    agent.restart()
    assert agent.exit("both/1/0").code == 6
    assert (agent.home.output_dir("both") / "times").read_text() == "begin\n"


def test_shim_and_zygote_dead_leave_no_process_and_an_exit_that_is_named(agent: RealAgent) -> None:
    agent.run("torn/1/0", "sh", "-c", "echo up; setsid sleep 300 & sleep 300")
    agent.wait_for_line("torn/1/0", "up")
    pid, zygote = agent.started("torn/1/0"), agent.record("zygote-plain")
    agent.kill_agent()
    wait_for_death(zygote)
    os.kill(pid, signal.SIGKILL)
    agent.restart()
    exit = agent.exit("torn/1/0")
    assert exit.outcome == "unknown" and exit.failure is not None and exit.failure.code == "worker-lost"
    assert agent.leftovers("torn/1/0") == []


def test_the_agent_sees_a_signal_itself_when_the_zygote_is_gone(agent: RealAgent) -> None:
    agent.run("adopted/1/0", "sh", "-c", "echo up; sleep 300")
    agent.wait_for_line("adopted/1/0", "up")
    wait_for_death(agent.record("zygote-plain"))
    os.kill(agent.started("adopted/1/0"), signal.SIGKILL)
    exit = agent.exit("adopted/1/0")
    assert (exit.outcome, exit.signal) == ("killed", signal.SIGKILL)
    assert agent.leftovers("adopted/1/0") == []


def test_an_order_that_the_dead_agent_had_taken_runs_once(agent: RealAgent) -> None:
    """Killed right after it took the order: whether it was begun or not, it runs once when it is ordered again."""
    order = WorkerOrder(
        worker="order/1/0", kind="command", command=("sh", "-c", "echo x >> $RACIMO_OUTPUT_DIR/ran; sleep 0.2")
    )
    assert agent.request(StartWorker(order=order)) == StartReply()
    agent.kill_agent()
    agent.restart()
    assert agent.request(StartWorker(order=order)) == StartReply()
    assert agent.exit("order/1/0").code == 0
    assert (agent.home.output_dir("order") / "ran").read_text() == "x\n"


def test_sigterm_leaves_the_workers_running(agent: RealAgent) -> None:
    agent.run("stay/1/0", *SLOW_COMMAND)
    agent.wait_for_line("stay/1/0", "up")
    agent.process.terminate()
    assert agent.process.wait(5) == 0
    agent.restart()
    assert agent.exit("stay/1/0").code == 6


def test_a_frozen_worker_is_found_and_can_be_stopped_by_the_next_agent(agent: RealAgent) -> None:
    agent.run("frozen/1/0", "sh", "-c", "echo up; sleep 300")
    agent.wait_for_line("frozen/1/0", "up")
    agent.request(StopWorker(worker="frozen/1/0", how="pause"))
    agent.kill_agent()
    agent.restart()
    agent.request(StopWorker(worker="frozen/1/0", how="stop", grace_s=5))
    exit = agent.exit("frozen/1/0")
    assert (exit.outcome, exit.signal) == ("killed", signal.SIGTERM)
