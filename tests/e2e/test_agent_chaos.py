"""Agent, zygotes and shims killed at seeded moments under a stream of orders: each runs at most once and is told."""

import os
import random
import signal
import time
from pathlib import Path

import pytest
from agent_harness import RealAgent

from racimo.agent.processes import is_alive, read_process_file
from racimo.agent.protocol import StartWorker, WorkerOrder
from racimo.spec.errors import RacimoError
from racimo.state.events import WorkerExited

pytestmark = pytest.mark.e2e
SCRIPT = 'echo begin >> "$RACIMO_OUTPUT_DIR/ran"; sleep 0.$RANK; echo end >> "$RACIMO_OUTPUT_DIR/ran"; exit 3'


def order(number: int) -> WorkerOrder:
    return WorkerOrder(worker=f"c{number}/1/0", kind="command", command=("sh", "-c", SCRIPT), rank=number % 4)


def kill(agent: RealAgent, what: str) -> None:
    if what == "agent":
        agent.kill_agent()
        agent.restart()
        return
    if what == "zygote-plain":
        record = read_process_file(agent.home.processes_dir / "zygote-plain.json")
    else:
        pid_files = sorted((agent.home.node_dir / "workers").glob("*/*/*/pid.json"))
        record = next((found for path in pid_files if is_alive(found := read_process_file(path))), None)  # type: ignore[arg-type]
    if record is not None and is_alive(record):
        os.kill(record.pid, signal.SIGKILL)


def stream(agent: RealAgent, seed: int, num_orders: int) -> None:
    """Sends orders as control does: again after every loss of the agent, until each one's end is told."""
    randomness = random.Random(seed)
    shims_killed = 0
    for number in range(num_orders):
        for _ in range(10):
            try:
                agent.start(order(number))
                break
            except RacimoError as error:
                assert error.code == "unreachable", error
        time.sleep(randomness.random() * 0.05)  # the moment of the kill is what is drawn
        if randomness.random() < 0.4:
            what = randomness.choice(("agent", "zygote-plain", "shim"))
            shims_killed += what == "shim"
            kill(agent, what)
            if what == "agent":
                known = {state.worker for state in agent.client.welcome.workers}
                ended = {event_name(numbered.event) for numbered in agent.events}
                for earlier in range(number + 1):
                    if order(earlier).worker not in known | ended:
                        agent.request(StartWorker(order=order(earlier)))
    for number in range(num_orders):
        name = order(number).worker
        exit = agent.exit(name, timeout_s=30)
        path = agent.home.output_dir(f"c{number}") / "ran"
        lines = path.read_text() if path.exists() else ""
        story = (seed, name, exit, lines)
        assert lines in ("", "begin\n", "begin\nend\n"), story
        assert exit.outcome in ("failed", "killed", "unknown"), story
        assert exit.outcome != "failed" or (exit.code == 3 and lines == "begin\nend\n"), story
        assert agent.leftovers(name) == [], story
    unclear = [number for number in range(num_orders) if agent.exit(order(number).worker).outcome != "failed"]
    assert len(unclear) <= shims_killed, (seed, unclear)


def event_name(event: object) -> str:
    return f"{event.run}/{event.attempt}/{event.index}" if isinstance(event, WorkerExited) else ""


@pytest.mark.parametrize("seed", [1, 2])
def test_orders_run_once_whatever_is_killed(tmp_path: Path, seed: int) -> None:
    agent = RealAgent(tmp_path / "home")
    try:
        stream(agent, seed, num_orders=20)
    finally:
        agent.close()


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(100, 120))
def test_many_orders_run_once_whatever_is_killed(tmp_path: Path, seed: int) -> None:
    agent = RealAgent(tmp_path / "home")
    try:
        stream(agent, seed, num_orders=50)
    finally:
        agent.close()
