"""A cluster over the hosts of a stage: the first is the head, the others join it by the line that `up` printed."""

import contextlib
import hashlib
import json
import os
import re
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from stage import Host, Hosts

from racimo.act.guardian import ProcessRecord, read_live
from racimo.client import Client
from racimo.control.views import NodeView, RunView
from racimo.spec.home import Home
from racimo.spec.run import RunSpec

PORT = 7700
WAIT_S = 60.0
SCRIPTS = Path(__file__).parent.parent / "e2e" / "scripts"
RUNNING_EVERY_S = 1.0


class HostsCluster:
    """`slots`: CPU slots of each host, or of each in turn. `carrier`: as `racimo up --carrier`."""

    def __init__(self, hosts: Hosts, slots: int | Sequence[int] = 1, *, carrier: str = "link") -> None:
        self.hosts = hosts
        self.slots = [slots] * 99 if isinstance(slots, int) else list(slots)
        self.carrier = carrier
        self.client = Client(home=self.home(self.head).root, may_start=False, say=lambda _text: None)

    @property
    def head(self) -> Host:
        return self.hosts[0]

    @property
    def address(self) -> str:
        """Where machines join."""
        return f"{self.head.address}:{PORT}"

    def home(self, host: Host) -> Home:
        return Home(host.folder / "r")

    @property
    def homes(self) -> list[Home]:
        return [self.home(host) for host in self.hosts]

    # Commands

    def cli(
        self,
        host: Host,
        *words: str,
        env: dict[str, str] | None = None,
        timeout_s: float = WAIT_S,
        cwd: Path = SCRIPTS,
        **kwargs: Any,
    ) -> subprocess.CompletedProcess[str]:
        """`racimo WORDS` typed on a host; look at its `returncode` yourself."""
        environment = {"RACIMO_HOME": str(self.home(host).root)} | (env or {})
        command = [sys.executable, "-m", "racimo.cli.main", *words]
        return host.run(command, env=environment, timeout_s=timeout_s, cwd=cwd, **kwargs)

    def command(self, host: Host, *words: str, **kwargs: Any) -> str:
        """The same, which must succeed; what it wrote to stdout."""
        done = self.cli(host, *words, **kwargs)
        if done.returncode:
            raise RuntimeError(
                f"racimo {' '.join(words)} on {host.name} ended with {done.returncode}:\n{done.stderr}{done.stdout}"
            )
        return done.stdout

    def up(self, *, bind: bool = True) -> None:
        words = ["--bind", self.address, "--carrier", self.carrier] if bind else []
        self.command(self.head, "up", "--slots", str(self.slots[0]), *words)

    def join(self, host: Host, *words: str, slots: int | None = None) -> None:
        slots = self.slots[self.hosts.index(host)] if slots is None else slots
        line = ["join", self.address, "--token-file", "-", "--slots", str(slots), *words]
        self.command(host, *line, input=self.token() + "\n")

    def start(self) -> "HostsCluster":
        """Head and all others, every node up."""
        self.up()
        for host in list(self.hosts)[1:]:
            self.join(host)
        self.wait_nodes(len(self.hosts))
        return self

    def token(self) -> str:
        """`SECRET:PIN`, as the printed line holds it."""
        home = self.home(self.head)
        pin = hashlib.sha256(ssl.PEM_cert_to_DER_cert(home.certificate_file.read_text())).hexdigest()
        return f"{home.token_file.read_text().strip().partition(':')[0]}:{pin}"

    def down(self) -> None:
        """Everywhere, joined hosts first; a host that is cut off or gone is left to the stage's end."""
        for host in [*list(self.hosts)[1:], self.head]:
            if self.home(host).root.exists():
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.cli(host, "down", *([] if host is self.head else ["--now"]), timeout_s=30)

    # The API, from this process

    @contextlib.contextmanager
    def api(self) -> Iterator[Client]:
        """The head's API on its loopback."""
        with self.head.inside():
            yield self.client

    def view(self, run: str) -> RunView:
        with self.api() as client:
            return client.run(run)

    def nodes(self) -> dict[str, NodeView]:
        """By host name."""
        with self.api() as client:
            return {view.node.host: view for view in client.nodes()}

    def wait(self, run: str, timeout_s: float = WAIT_S) -> RunView:
        with self.api() as client:
            return client.wait(run, timeout_s=timeout_s)

    def submit(self, spec: RunSpec, root: Path) -> str:
        with self.api() as client:
            return client.submit(spec, root=root).id

    def wait_nodes(self, count: int, timeout_s: float = 30.0) -> None:
        """Until so many nodes are up."""
        wait_until(
            lambda: sum(view.node.status == "up" for view in self.nodes().values()) == count,
            f"{count} nodes up",
            timeout_s,
        )

    def train(self, *words: str) -> str:
        """`racimo train tiny.py:train` in the background; the run's id."""
        return self.command(self.head, "train", "tiny.py:train", "--detach", *words).split()[0]

    def final_hash(self, run: str, timeout_s: float = WAIT_S) -> str:
        """What the workers that finished say of the final state; they must agree."""
        view = self.wait(run, timeout_s)
        assert view.status == "succeeded", self.story(run, view)
        found = {path.read_text() for home in self.homes for path in home.output_dir(run).glob("hash.txt")}
        assert len(found) == 1, found
        return found.pop()

    def committed(self, run: str) -> int:
        """The newest step that any worker wrote down."""
        return max((line["step"] for line in self.steps(run)), default=0)

    def steps(self, run: str, host: Host | None = None) -> list[dict[str, Any]]:
        """All whole lines of `steps.jsonl`, of all hosts or of one."""
        found = []
        for home in [self.home(host)] if host is not None else self.homes:
            for path in (home.node_dir / "workers" / run).glob("*/*/steps.jsonl"):
                found += [json.loads(line) for line in path.read_text().split("\n")[:-1]]
        return found

    def assert_every_micro_shard_once(self, run: str, until: int, micro_shards: int = 8) -> None:
        """From the workers' own lines: steps 1..until without a gap, each shard of each in one contribution.

        A step has lines of two generations only if whoever committed it in the older one died alone; the newer counts.
        """
        lines = self.steps(run)
        assert {line["step"] for line in lines} == set(range(1, until + 1))
        for step in range(1, until + 1):
            of_step = [line for line in lines if line["step"] == step]
            newest = max(line["generation"] for line in of_step)
            for line in of_step:
                if line["generation"] == newest:
                    counted = sorted(shard for shards in line["contributions"].values() for shard in shards)
                    assert counted == list(range(micro_shards)), line
        assert len({(line["step"], line["loss"]) for line in lines}) == until, "a step with two losses"

    def wait_step(self, run: str, step: int, timeout_s: float = WAIT_S) -> None:
        """Until that step is committed; fails at once when the run has ended before."""
        looked_s = time.monotonic()

        def reached() -> bool:
            nonlocal looked_s
            if self.committed(run) >= step:
                return True
            if time.monotonic() - looked_s > RUNNING_EVERY_S:
                looked_s = time.monotonic()
                view = self.view(run)
                assert view.status not in ("failed", "lost", "stopped"), self.story(run, view)
                return view.status == "succeeded"
            return False

        wait_until(reached, f"step {step} of {run}", timeout_s, lambda: self.story(run))

    def story(self, run: str, view: RunView | None = None) -> str:
        """What a person wants to see of a run that went wrong."""
        view = view or self.view(run)
        workers = [f"{worker.id} on {worker.node}: {worker.status} {worker.exit or ''}" for worker in view.workers]
        done = self.cli(self.head, "events", run)
        return "\n".join([f"{run} {view.status}: {view.reason} {view.failure}", *workers, done.stdout[-4000:]])

    # Processes

    def service(self, host: Host, role: str) -> ProcessRecord | None:
        return read_live(self.home(host).root, role)

    def kill(self, host: Host, role: str) -> None:
        """SIGKILL to a service of that host."""
        record = self.service(host, role)
        assert record is not None, f"no {role} lives on {host.name}"
        os.kill(record.pid, signal.SIGKILL)

    def worker_pids(self, run: str, host: Host | None = None) -> dict[str, int]:
        """Worker id to pid of those that live, on all hosts or on one."""
        found = {}
        for home in [self.home(host)] if host is not None else self.homes:
            for path in (home.node_dir / "workers" / run).glob("*/*/pid.json"):
                record = json.loads(path.read_bytes())
                if ProcessRecord(record["pid"], record["start_ticks"], "worker").alive:
                    found["/".join([run, *path.parts[-3:-1]])] = record["pid"]
        return found

    def host_of(self, node: str) -> Host:
        return next(host for host in self.hosts if (self.home(host).node_dir / "id").read_text().strip() == node)


def wait_until(
    condition: Callable[[], object],
    what: str,
    timeout_s: float = WAIT_S,
    story: Callable[[], str] = lambda: "",
) -> None:
    """Waits for something that other processes do and that announces itself in no other way."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline_s:
            raise AssertionError(f"after {timeout_s:.0f} s still not: {what}\n{story()}")
        time.sleep(0.02)


def printed_token(text: str) -> str:
    """The token in the line that `racimo up --bind` printed."""
    found = re.search(r"echo (\S+:[0-9a-f]{64}) \| racimo join", text)
    assert found is not None, text
    return found[1]
