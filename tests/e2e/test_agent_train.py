"""Training workers on a real agent: how a script runs, and how everything that ends it is named."""

import os
import signal
from collections.abc import Iterator

import pytest
from agent_harness import RealAgent

from racimo.act.agent_client import AgentClient
from racimo.agent.protocol import (
    Announce,
    ControlHello,
    Member,
    ReadReports,
    ReportBatch,
    StopWorker,
    Usage,
    WorkerOrder,
)
from racimo.spec.errors import RacimoError
from racimo.state.nouns import Failure
from racimo.version import PROTOCOL_VERSION

pytestmark = pytest.mark.e2e

ELASTIC = """
import json, os, socket, struct, time
import msgspec
from racimo.agent.protocol import Progress, Ready, WorkerHello
from racimo.worker.context import load_context
me = load_context()
link = socket.socket(socket.AF_UNIX)
link.connect(me.agent_socket)
def say(message):
    body = msgspec.msgpack.encode(message)
    link.sendall(struct.pack(">I", len(body)) + body)
say(WorkerHello(worker=me.worker, pid=os.getpid()))
say(Ready(address="127.0.0.1:1", micro_shards=8, numerics="x"))
"""


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealAgent]:
    real = RealAgent(tmp_path_factory.mktemp("agent") / "home")
    yield real
    real.close()


def failure_of(agent: RealAgent, worker: str) -> Failure:
    exit = agent.exit(worker, timeout_s=60)
    assert exit.outcome == "failed" and exit.failure is not None, exit
    return exit.failure


def test_an_order_that_comes_while_torch_is_imported_waits_and_that_is_said(agent: RealAgent) -> None:
    agent.train("early/1/0", "print('ran')")
    if "early/1/0" in {state.worker for state in agent.client.welcome.workers if state.pid is None}:
        assert any("importing torch" in warning for warning in agent.client.welcome.warnings)
    assert agent.exit("early/1/0", timeout_s=60).code == 0


def test_a_script_is_main_and_has_its_arguments_and_folder(agent: RealAgent) -> None:
    source = "import sys, os, mine\nprint(__name__, sys.argv, mine.VALUE, os.path.samefile(sys.path[0], os.getcwd()))"
    files = agent.put({"train.py": source, "mine.py": "VALUE = 5"})
    order = WorkerOrder(worker="main/1/0", kind="train", train_file="train.py", files=files, args=("--lr", "3e-4"))
    agent.start(order)
    assert agent.exit("main/1/0", timeout_s=60).code == 0
    assert agent.log("main/1/0") == "__main__ ['train.py', '--lr', '3e-4'] 5 True\n"


def test_a_function_gets_the_config_or_nothing_if_it_takes_nothing(agent: RealAgent) -> None:
    source = "def one(config): print(config['lr'])\ndef none(): print('none')"
    agent.train("one/1/0", source, train_function="one", config={"lr": 0.5})
    agent.train("none/1/0", source, train_function="none")
    assert agent.exit("one/1/0", timeout_s=60).code == agent.exit("none/1/0").code == 0
    assert (agent.log("one/1/0"), agent.log("none/1/0")) == ("0.5\n", "none\n")


def test_a_missing_module_is_named_with_host_and_line_before_anything_runs(agent: RealAgent) -> None:
    agent.train("missing/1/0", "print('ran')\nimport os\nimport no_such_module.inner\n")
    failure = failure_of(agent, "missing/1/0")
    assert failure.code == "module-missing" and "'no_such_module' (train.py:3)" in failure.message
    assert agent.client.welcome.node.host in failure.message
    assert agent.log("missing/1/0") == ""


def test_an_import_that_may_fail_is_no_reason_to_refuse(agent: RealAgent) -> None:
    agent.train("maybe/1/0", "try:\n    import no_such_module\nexcept ImportError:\n    print('without')\n")
    assert agent.exit("maybe/1/0", timeout_s=60).code == 0


def test_an_exception_shows_the_users_frames_only(agent: RealAgent) -> None:
    agent.train("boom/1/0", "def f():\n    raise ValueError('boom')\n\nf()\n", rank=3)
    failure = failure_of(agent, "boom/1/0")
    assert (failure.code, failure.rank, failure.worker) == ("worker-raised", 3, "boom/1/0")
    assert failure.message == "ValueError: boom (train.py:2)"
    assert failure.traceback.splitlines()[1] == '  File "train.py", line 4, in <module>'
    assert "racimo" not in failure.traceback
    assert agent.log("boom/1/0", "err") == failure.traceback


def test_a_syntax_error_is_shown_as_python_shows_it(agent: RealAgent) -> None:
    agent.train("syntax/1/0", "x = (\n")
    failure = failure_of(agent, "syntax/1/0")
    assert failure.code == "syntax-error"
    assert failure.traceback.splitlines()[:2] == ['  File "train.py", line 1', "    x = ("]


@pytest.mark.parametrize(
    ("name", "statement", "code"),
    [
        ("memory", "bytearray(10**15)", "out-of-memory"),
        ("allocator", "import torch; torch.empty(10**15)", "out-of-memory"),
        ("disk", "raise OSError(28, 'No space left on device')", "disk-full"),
    ],
)
def test_what_ran_out_is_named(agent: RealAgent, name: str, statement: str, code: str) -> None:
    agent.train(f"{name}/1/0", statement)
    assert failure_of(agent, f"{name}/1/0").code == code


def test_an_exit_code_is_honoured_and_open_files_are_flushed(agent: RealAgent) -> None:
    source = (
        "import os, sys\nfile = open(os.environ['RACIMO_OUTPUT_DIR'] + '/late', 'w')\nfile.write('kept')\nsys.exit(4)"
    )
    agent.train("exits/1/0", source)
    exit = agent.exit("exits/1/0", timeout_s=60)
    assert (exit.outcome, exit.code) == ("failed", 4)
    assert (agent.home.output_dir("exits") / "late").read_text() == "kept"


def test_an_abrupt_end_with_code_zero_is_a_failure_only_inside_run_steps(agent: RealAgent) -> None:
    agent.train("abrupt/1/0", "import os\nos._exit(0)")
    inside = (
        "import os\nfrom racimo.worker.context import load_context\n"
        "from racimo.worker.train.telemetry import Telemetry\nme = load_context()\n"
        "telemetry = Telemetry(me.worker, None, me.directory, 5)\nif not me.index: telemetry.close()\nos._exit(0)"
    )
    agent.train("inside/1/0", inside)
    agent.train("inside/1/1", inside, rank=1)
    assert (
        agent.exit("abrupt/1/0", timeout_s=60).outcome == agent.exit("inside/1/0", timeout_s=60).outcome == "finished"
    )
    failure = failure_of(agent, "inside/1/1")
    assert (failure.code, failure.rank) == ("worker-left-early", 1)


def test_leaving_on_request_is_no_failure(agent: RealAgent) -> None:
    agent.train("leaves/1/0", "from racimo.worker.context import WorkerLeaving\nraise WorkerLeaving('released')")
    exit = agent.exit("leaves/1/0", timeout_s=60)
    assert (exit.outcome, exit.failure) == ("released", None)


def test_a_killed_worker_is_recorded_and_leaves_no_child(agent: RealAgent) -> None:
    """torchft#63: a killed member must be known as dead."""
    source = (
        "import subprocess, time\nsubprocess.Popen(['sleep', '300'], start_new_session=True)\n"
        "print('up')\ntime.sleep(300)"
    )
    agent.train("killed/1/0", source)
    agent.wait_for_line("killed/1/0", "up")
    os.kill(agent.started("killed/1/0"), signal.SIGKILL)
    exit = agent.exit("killed/1/0")
    assert (exit.outcome, exit.signal) == ("killed", signal.SIGKILL)
    assert agent.leftovers("killed/1/0") == []


def test_a_hang_is_named_with_rank_line_and_who_waits(agent: RealAgent) -> None:
    """pytorch#118369, nccl#1324: a hang, and nobody can tell which rank, node or call."""
    stuck = ELASTIC + (
        "def forward():\n    while True: time.sleep(0.01)\n"
        "say(Progress(worker=me.worker, step=5, phase='compute', phase_number=7))\nprint('up')\nforward()\n"
    )
    waits = ELASTIC + (
        "say(Progress(worker=me.worker, step=5, phase='exchange', phase_number=7, waits_for=(1,)))\n"
        "print('up')\ntime.sleep(300)\n"
    )
    shared = {"hang_after_s": 0.5, "world_size": 2, "most": 2}
    files = agent.put({"stuck.py": stuck, "waits.py": waits})
    for index, script in enumerate(("waits.py", "stuck.py")):
        order = WorkerOrder(
            worker=f"hang/1/{index}", kind="train", train_file=script, files=files, rank=index, **shared
        )
        agent.start(order)
    failure = agent.hung("hang/1/1")
    assert failure.code == "worker-hung" and failure.rank == 1
    assert "rank 1 (hang/1/1) has been in phase 'compute'" in failure.message
    assert "stuck.py:" in failure.message and "in forward" in failure.message
    assert failure.message.endswith("while rank 0 waits for it")
    assert "forward" in failure.traceback
    for index in range(2):
        agent.request(StopWorker(worker=f"hang/1/{index}", how="abort"))
        exit = agent.wait_for(lambda event, index=index: type(event).__name__ == "WorkerExited" and event.index == index
                              and event.run == "hang")  # fmt: skip
        assert exit.commits == 5


def test_reports_count_once_per_step_and_name_whoever_says_them(agent: RealAgent) -> None:
    """ray#58870: unequal numbers of reports must not hang or double anything."""
    source = ELASTIC + (
        "from racimo.agent.protocol import Report\n"
        "say(Report(step=1, values={'loss': float(me.index)}))\n"
        "say(Report(step=1, values={'loss': 9.0, f'own{me.index}': 1.0}))\n"
        "say(Progress(worker=me.worker, step=3, phase='done', phase_number=9))\n"
        "link.shutdown(socket.SHUT_WR); link.recv(1)\n"
    )
    for index in range(2):
        agent.train(f"report/1/{index}", source, rank=index)
        assert agent.exit(f"report/1/{index}", timeout_s=60).code == 0
    reply = agent.request(ReadReports(run="report"))
    assert isinstance(reply, ReportBatch) and reply.next == 3
    assert [report.values for report in reply.reports] == [{"loss": 0.0}, {"own0": 1.0}, {"own1": 1.0}]
    assert agent.request(ReadReports(run="report", after=2)).reports == reply.reports[2:]


def test_a_generation_is_told_to_those_who_are_there_and_those_who_come(agent: RealAgent) -> None:
    source = ELASTIC + (
        "from racimo.agent.protocol import MessageToWorker\nprint('up')\n"
        "for _ in range(2):\n"
        "    (length,) = struct.unpack('>I', link.recv(4))\n"
        "    print(msgspec.msgpack.decode(link.recv(length), type=MessageToWorker).number)\n"
    )
    member = Member("gen/1/0", "127.0.0.1:1")
    agent.request(Announce(run="gen", attempt=1, number=4, members=(member,), reason="first"))
    agent.train("gen/1/0", source)
    agent.wait_for_line("gen/1/0", "4")
    agent.request(Announce(run="gen", attempt=1, number=3, members=(member,), reason="older"))
    agent.request(Announce(run="gen", attempt=1, number=5, members=(member,), reason="newer"))
    assert agent.exit("gen/1/0").code == 0
    assert agent.log("gen/1/0") == "up\n4\n5\n"


def test_training_outlives_its_zygote(agent: RealAgent) -> None:
    agent.train("zygote/1/0", "import time\nprint('up')\ntime.sleep(0.5)\nraise SystemExit(8)")
    agent.wait_for_line("zygote/1/0", "up")
    zygote = agent.record("zygote-torch")
    os.kill(zygote.pid, signal.SIGKILL)
    assert agent.exit("zygote/1/0").code == 8
    agent.train("zygote-new/1/0", "print('again')")
    assert agent.exit("zygote-new/1/0", timeout_s=60).code == 0


def test_only_the_newest_control_process_is_heard(agent: RealAgent) -> None:
    first = agent.client
    second = agent.call(
        AgentClient.connect(agent.home.agent_socket, ControlHello(cluster="x", protocol=PROTOCOL_VERSION))
    )
    agent.call(first.closed.wait())
    with pytest.raises(RacimoError, match="ended"):
        agent.call(first.request(Usage()))
    assert agent.call(second.request(Usage())).free_disk_bytes > 0
    agent.call(second.close())


def test_an_elastic_worker_is_asked_to_pause(agent: RealAgent) -> None:
    source = ELASTIC + (
        "from racimo.agent.protocol import MessageToWorker\nfrom racimo.worker.context import WorkerLeaving\n"
        "print('up')\n(length,) = struct.unpack('>I', link.recv(4))\n"
        "print(msgspec.msgpack.decode(link.recv(length), type=MessageToWorker))\nraise WorkerLeaving('paused')\n"
    )
    agent.train("asked/1/0", source)
    agent.wait_for_line("asked/1/0", "up")
    agent.wait_for(lambda event: type(event).__name__ == "WorkerReady" and event.run == "asked")
    agent.request(StopWorker(worker="asked/1/0", how="pause"))
    assert agent.exit("asked/1/0").outcome == "paused"
    assert "PleasePause()" in agent.log("asked/1/0")
