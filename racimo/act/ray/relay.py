"""The relay: a detached actor of Ray, one per node, which holds the node's devices in Ray's accounts.

It does no work and carries no data. On a node that came through Ray alone it has our agent started, in a session of
its own with a clean environment (Ray ends the children of its actors). Runs inside Ray's worker; imports no Ray.
"""

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Literal

import msgspec

from racimo.act import guardian
from racimo.agent.whole_file import write_whole
from racimo.spec.config import parse_address, read_join
from racimo.spec.errors import RacimoError
from racimo.spec.home import Home

SOCKET_TIMEOUT_S = 1.0
LOG_BYTES = 4000


class RelayState(msgspec.Struct, frozen=True, kw_only=True):
    """`agent`: whether our agent serves this machine, is being started, or why it is not."""

    node: str
    pid: int
    agent: Literal["up", "starting", "away"]
    problem: str = ""


class Relay:
    """`ping` says how things are; `hold` is told what the node is part of."""

    def __init__(self, node: str) -> None:
        self._node = node
        self._home = Home.default()
        self._joining: subprocess.Popen[bytes] | None = None
        self._joined = False
        self._problem = ""

    def ping(self) -> RelayState:
        """At once, whatever the agent does."""
        agent: Literal["up", "starting", "away"] = "away"
        if _answers(self._home.agent_socket):
            agent = "up"
            if self._joined:
                write_whole(self._mark, self._node.encode())
                self._joined = False
        elif self._is_joining():
            agent = "starting"
        return RelayState(node=self._node, pid=os.getpid(), agent=agent, problem="" if agent == "up" else self._problem)

    def hold(self, cluster: str, token: str, slots: int | None) -> RelayState:
        """The node is part of the cluster at that address: unless an agent is here, one is started. Returns at once;
        `ping` says what became of it. The token comes this way so that it stands in no list of processes."""
        state = self.ping()
        if state.agent != "away":
            return state
        try:
            joined = read_join(self._home)
        except RacimoError as error:
            self._problem = error.message
            return self.ping()
        if self._home.config_file.exists() and joined is None:
            self._problem = "its home folder is that of another cluster's head"
        elif joined is None and self._mark.exists() and self._mark.read_text() == self._node:
            self._problem = "it left the cluster; racimo join there takes it back"
        elif joined is None:
            self._joined = True
            self._begin(_join_program(self._node, cluster, slots), token)
        elif parse_address(joined.address) != parse_address(cluster):
            self._problem = f"its home folder belongs to the cluster at {joined.address}"
        else:
            self._begin(["-P", "-c", _START_SUPERVISOR, os.fspath(self._home.root)], "")
        return self.ping()

    def _begin(self, program: list[str], token: str) -> None:
        environment = guardian.clean_environment() | {"RACIMO_HOME": os.fspath(self._home.root)}
        self._home.service_logs_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(self._log, "wb") as log:
            self._joining = subprocess.Popen(
                [sys.executable, *program],
                env=environment,
                cwd="/",
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        assert self._joining.stdin is not None
        with self._joining.stdin as given:
            given.write(token.encode() + b"\n")
        self._problem = ""

    @property
    def _mark(self) -> Path:
        """Says as which node this machine has joined through here: who types `racimo down` there is not overruled."""
        return self._home.node_dir / "ray-node"

    @property
    def _log(self) -> Path:
        return self._home.service_logs_dir / "joining.log"

    def _is_joining(self) -> bool:
        if self._joining is None:
            return False
        code = self._joining.poll()
        if code is None:
            return True
        self._joining = None
        said = self._log.read_bytes()[-LOG_BYTES:].decode(errors="replace").strip().splitlines()
        self._problem = "" if code == 0 else "it could not join: " + (said[0] if said else f"exit code {code}")
        return False


_START_SUPERVISOR = "import sys; from racimo.act.guardian import start_supervisor; start_supervisor(sys.argv[1])"


def _join_program(node: str, cluster: str, slots: int | None) -> list[str]:
    # Without a Ray part of ours: this machine has one.
    program = ["-P", "-m", "racimo.cli.main", "join", cluster, "--token-file", "-", "--carrier", "link", "--name", node]
    return program if slots is None else [*program, "--slots", str(slots)]


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(SOCKET_TIMEOUT_S)
        try:
            probe.connect(os.fspath(path))
        except OSError:
            return False
    return True
