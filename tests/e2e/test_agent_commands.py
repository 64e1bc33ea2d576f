"""Commands on a real agent: their output, their exits, their signals, and that nothing of them is left."""

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from agent_harness import RealAgent

from racimo.act.agent_client import AgentClient
from racimo.agent.logs import MAX_LOG_BYTES
from racimo.agent.protocol import (
    ControlHello,
    FileEntry,
    ForgetRun,
    PutBlob,
    StartReply,
    StartWorker,
    StopWorker,
    Usage,
    UsageReply,
    WorkerOrder,
)
from racimo.spec.errors import RacimoError
from racimo.state.events import WorkerExited

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealAgent]:
    real = RealAgent(tmp_path_factory.mktemp("agent") / "home")
    yield real
    real.close()


def test_a_command_runs_and_its_output_and_exit_are_kept(agent: RealAgent) -> None:
    agent.run("echo/1/0", "echo", "hi")
    exit = agent.exit("echo/1/0")
    assert (exit.outcome, exit.code, agent.log("echo/1/0")) == ("finished", 0, "hi\n")
    assert 0 < exit.held_s < 5


def test_the_same_order_twice_runs_once(agent: RealAgent) -> None:
    order = WorkerOrder(worker="twice/1/0", kind="command", command=("sh", "-c", "echo x >> $RACIMO_OUTPUT_DIR/ran"))
    agent.start(order)
    agent.start(order)
    agent.exit("twice/1/0")
    agent.start(order)
    agent.run("after/1/0", "true")
    agent.exit("after/1/0")
    assert (agent.home.output_dir("twice") / "ran").read_text() == "x\n"


def test_an_exit_code_is_told(agent: RealAgent) -> None:
    agent.run("code/1/0", "sh", "-c", "exit 7")
    exit = agent.exit("code/1/0")
    assert (exit.outcome, exit.code, exit.failure) == ("failed", 7, None)


def test_a_signal_is_told(agent: RealAgent) -> None:
    agent.run("segv/1/0", "sh", "-c", "kill -SEGV $$")
    exit = agent.exit("segv/1/0")
    assert (exit.outcome, exit.signal) == ("killed", signal.SIGSEGV)


def test_a_command_that_does_not_exist_is_named_with_its_host(agent: RealAgent) -> None:
    agent.run("absent/1/0", "no-such-command")
    exit = agent.exit("absent/1/0")
    assert exit.code == 127 and exit.failure is not None
    assert exit.failure.code == "file-missing" and "'no-such-command'" in exit.failure.message


def test_files_are_asked_for_once_and_unpacked_into_a_private_folder(agent: RealAgent) -> None:
    files = agent.put({"a/data.txt": "first"})
    missing = FileEntry("later.txt", 0o644, 1, "0" * 64)
    order = WorkerOrder(worker="files/1/0", kind="command", command=("cat", "a/data.txt"), files=files)
    reply = agent.request(StartWorker(order=WorkerOrder(worker="m/1/0", kind="command", files=(missing,))))
    assert reply == StartReply(missing=("0" * 64,))
    agent.start(order)
    assert agent.exit("files/1/0").code == 0
    assert agent.log("files/1/0") == "first"
    with pytest.raises(RacimoError, match="SHA-256"):
        agent.request(PutBlob(sha256="1" * 64, content=b"other"))


def test_the_environment_is_torchruns(agent: RealAgent) -> None:
    names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK MASTER_ADDR OMP_NUM_THREADS TORCHELASTIC_RUN_ID"
    script = f"for n in {names}; do eval echo $n=\\$$n; done; echo $SECRET >&2; echo $MASTER_PORT"
    ports = []
    for rank in range(2):
        agent.run(
            f"env/1/{rank}", "sh", "-c", script,
            rank=rank, world_size=2, threads=3, rendezvous_key="env/1", secrets={"SECRET": "s3cret-value"},
        )  # fmt: skip
    for rank in range(2):
        assert agent.exit(f"env/1/{rank}").code == 0
        *lines, port = agent.log(f"env/1/{rank}").split()
        ports.append(port)
        assert lines == [
            f"RANK={rank}", f"LOCAL_RANK={rank}", "WORLD_SIZE=2", "LOCAL_WORLD_SIZE=2", "GROUP_RANK=0",
            "MASTER_ADDR=127.0.0.1", "OMP_NUM_THREADS=3", "TORCHELASTIC_RUN_ID=env",
        ]  # fmt: skip
        assert agent.log(f"env/1/{rank}", "err") == "s3cret-value\n"
    assert ports[0] == ports[1]
    written = b"".join(path.read_bytes() for path in agent.home.worker_dir("env/1/0").glob("*.json"))
    assert b"s3cret-value" not in written


def test_stop_is_sigterm_and_then_sigkill(agent: RealAgent) -> None:
    agent.run("polite/1/0", "sh", "-c", "trap 'echo bye; exit 5' TERM; echo up; while :; do sleep 0.05; done")
    agent.run("stubborn/1/0", "sh", "-c", "trap '' TERM; echo up; while :; do sleep 0.05; done")
    for worker in ("polite/1/0", "stubborn/1/0"):
        agent.wait_for_line(worker, "up")
        agent.request(StopWorker(worker=worker, how="stop", grace_s=0.3))
    assert agent.exit("polite/1/0").code == 5 and "bye" in agent.log("polite/1/0")
    exit = agent.exit("stubborn/1/0")
    assert (exit.outcome, exit.signal) == ("killed", signal.SIGKILL)


def test_a_paused_command_is_frozen_and_thaws(agent: RealAgent) -> None:
    agent.run("cold/1/0", "sh", "-c", "echo up; sleep 0.3; echo done")
    agent.wait_for_line("cold/1/0", "up")
    agent.request(StopWorker(worker="cold/1/0", how="pause"))
    time.sleep(0.6)  # longer than it would have run
    assert "done" not in agent.log("cold/1/0")
    agent.request(StopWorker(worker="cold/1/0", how="thaw"))
    assert agent.exit("cold/1/0").code == 0


def test_a_pause_that_comes_before_the_process_is_there_is_not_lost(agent: RealAgent) -> None:
    files = agent.put({f"file{number}": str(number) for number in range(50)})
    command = ("sh", "-c", "sleep 0.2; echo done")
    order = WorkerOrder(worker="early/1/0", kind="command", command=command, files=files)

    async def at_once() -> None:
        await asyncio.gather(
            agent.client.request(StartWorker(order=order)),
            agent.client.request(StopWorker(worker="early/1/0", how="pause")),
        )

    assert agent.client is not None
    agent.call(at_once())
    agent.started("early/1/0")
    time.sleep(0.5)  # longer than it would have run
    assert agent.log("early/1/0") == ""
    agent.request(StopWorker(worker="early/1/0", how="thaw"))
    assert agent.exit("early/1/0").code == 0


def test_stopping_an_order_that_never_came_makes_sure_that_it_never_runs(agent: RealAgent) -> None:
    agent.request(StopWorker(worker="never/1/0", how="abort"))
    assert agent.exit("never/1/0").outcome == "killed"
    agent.run("never/1/0", "sh", "-c", "echo x > $RACIMO_OUTPUT_DIR/ran")
    agent.run("other/1/0", "true")
    agent.exit("other/1/0")
    assert not (agent.home.output_dir("never") / "ran").exists()


def test_no_process_is_left_behind_not_even_one_that_left_the_session(agent: RealAgent) -> None:
    """ray#31451, ray#32725: processes and device memory held after the end."""
    agent.run("daemon/1/0", "sh", "-c", "setsid sh -c 'sleep 300 & sleep 300' & sleep 300 & sleep 0.2; exit 0")
    assert agent.exit("daemon/1/0").code == 0
    assert agent.leftovers("daemon/1/0") == []


def test_kill_of_the_shim_takes_the_command_along(agent: RealAgent) -> None:
    agent.run("shim/1/0", "sh", "-c", "echo up; sleep 300")
    agent.wait_for_line("shim/1/0", "up")
    os.kill(agent.started("shim/1/0"), signal.SIGKILL)
    exit = agent.exit("shim/1/0")
    assert (exit.outcome, exit.signal) == ("killed", signal.SIGKILL)
    assert agent.leftovers("shim/1/0") == []


def test_a_death_is_told_within_milliseconds(agent: RealAgent) -> None:
    delays = []
    for number in range(5):
        worker = f"quick{number}/1/0"
        agent.run(worker, "sleep", "300")
        pid = agent.started(worker)
        begun = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        agent.exit(worker)
        delays.append(time.monotonic() - begun)
    assert sorted(delays)[2] < 0.03, delays


def test_a_limit_of_memory_is_named_with_its_numbers(agent: RealAgent) -> None:
    script = "x = bytearray(300_000_000); import time; time.sleep(60)"
    agent.run("fat/1/0", "python", "-c", script, memory_bytes=100_000_000)
    exit = agent.exit("fat/1/0")
    assert exit.outcome == "killed" and exit.failure is not None and exit.failure.code == "out-of-memory"
    assert "100 MB" in exit.failure.message


def test_exec_runs_beside_a_worker_and_ends_with_it(agent: RealAgent) -> None:
    agent.run("main/1/0", "sh", "-c", "echo here > mark; echo up; sleep 300", variables={"COLOUR": "blue"})
    agent.wait_for_line("main/1/0", "up")
    beside = {"kind": "exec", "exec_of": "main/1/0"}
    agent.start(WorkerOrder(worker="main/1/1000001", command=("sh", "-c", "cat mark; echo $COLOUR"), **beside))
    assert agent.exit("main/1/1000001").code == 0
    assert agent.log("main/1/1000001") == "here\nblue\n"
    agent.start(WorkerOrder(worker="main/1/1000002", command=("sleep", "300"), **beside))
    agent.started("main/1/1000002")
    agent.request(StopWorker(worker="main/1/0", how="abort"))
    assert agent.exit("main/1/0").outcome == "killed"
    assert agent.exit("main/1/1000002").outcome == "killed"


def test_an_older_attempt_is_never_alive_beside_a_newer(agent: RealAgent) -> None:
    agent.run("fence/1/0", "sleep", "300")
    agent.started("fence/1/0")
    agent.run("fence/2/0", "true")  # waits for the stray, which control has given up with its node, to be ended
    agent.request(StopWorker(worker="fence/1/0", how="abort"))
    assert agent.exit("fence/2/0").code == 0
    ends = [one.event for one in agent.events if isinstance(one.event, WorkerExited) and one.event.run == "fence"]
    assert [event.attempt for event in ends] == [1, 2]
    with pytest.raises(RacimoError, match="is newer"):
        agent.run("fence/1/1", "true")


def test_forgetting_a_run_deletes_its_files_but_not_its_outputs(agent: RealAgent) -> None:
    agent.run("gone/1/0", "sh", "-c", "echo x > $RACIMO_OUTPUT_DIR/kept; echo y > other")
    agent.exit("gone/1/0")
    agent.request(ForgetRun(run="gone"))
    assert not (agent.home.node_dir / "workers" / "gone").exists()
    assert not (agent.home.node_dir / "files" / "gone").exists()
    assert (agent.home.output_dir("gone") / "kept").exists()


def test_usage_names_agent_and_zygotes(agent: RealAgent) -> None:
    reply = agent.request(Usage())
    assert isinstance(reply, UsageReply)
    assert {"agent", "zygote-plain", "zygote-torch"} <= {process.role for process in reply.processes}
    assert reply.free_disk_bytes > 0 and reply.free_memory_bytes > 0


def test_a_client_of_another_version_is_refused(agent: RealAgent) -> None:
    with pytest.raises(RacimoError) as caught:
        agent.call(AgentClient.connect(agent.home.agent_socket, ControlHello(cluster="x", protocol=999)))
    assert caught.value.code == "version-mismatch"


def test_the_socket_is_for_its_user_alone(agent: RealAgent) -> None:
    path: Path = agent.home.agent_socket
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700


def test_a_burst_right_before_the_end_leaves_no_more_than_a_log_may_take(agent: RealAgent) -> None:
    agent.run("burst/1/0", "sh", "-c", "yes 0123456789abcdef | head -c 100000000")
    agent.exit("burst/1/0")
    path = agent.home.worker_dir("burst/1/0") / "out.log"
    assert path.stat().st_size == 100_000_000, "offsets stay valid"
    assert path.stat().st_blocks * 512 <= MAX_LOG_BYTES
