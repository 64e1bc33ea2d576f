"""Several hosts on one machine: network namespaces on a switch of their own, with rates, delay and cables to cut.

    with Hosts(3) as hosts:                     # 10.77.X.1 to .3, 1 Gbit each way
        hosts[1].run(["python", "-c", "..."])
        hosts[1].cut()                          # the switch's port goes down: silence, no reset
        hosts[1].heal()

A host is a network namespace, a host name (`h1`, `h2`: they resolve) and a folder, its HOME; processes, files and
devices are the machine's own.
Everything is named `racimo-X-...`, X being this stage's alone (a lock in `/run/racimo-hosts` says so), so that what a
killed stage left behind is cleared away by the next one. Needs root, `ip` and `tc`; `why_not()` says what is missing.
The kernel needs neither netem nor filter actions: delay is a relay in user space, a one-way cut a `blackhole` queue.
"""

import contextlib
import ctypes
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

RUN_DIR = Path("/run/racimo-hosts")
ETC_DIR = Path("/etc/netns")
"""`ip netns exec NAME` shows what lies in its folder NAME in place of the files of `/etc`."""
MOST_HOSTS = 50
NAMESPACES = Path("/run/netns")
MOST_STAGES = 200
GBIT = "1gbit"
BURST = "256kb"
"""A bucket holds at least one offloaded segment of 64 KiB; larger ones would be cut in software."""
QUEUE = "50ms"
SETTLE_S = 10.0
"""How long killed processes may take to be gone."""
Direction = Literal["both", "in", "out"]
"""Of a cut, as the host sees it: `in` is what it would receive, `out` what it sends."""

_CLONE_NEWNET = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)


def why_not() -> str:
    """Why no hosts can be made here, as a sentence; "" if they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [name for name in ("ip", "tc", "nsenter", "unshare") if shutil.which(name) is None]
    if missing:
        return f"{missing[0]} is not installed (apt-get install iproute2 util-linux)"
    tried = subprocess.run(["unshare", "--net", "--uts", "true"], capture_output=True, text=True)
    return "" if tried.returncode == 0 else f"namespaces cannot be made here: {tried.stderr.strip()}"


class Host:
    """One machine of the stage. `folder` is its HOME; `address` its only address besides loopback."""

    def __init__(self, stage: "Hosts", number: int, folder: Path, rate: str, delay_s: float) -> None:
        self.name = f"h{number}"
        self.address = f"10.77.{stage.number}.{number}"
        self.folder = folder
        self.rate = rate
        self._switch = stage.switch
        self._names = stage.names
        self.namespace = f"{stage.prefix}-{self.name}"
        self._uts = RUN_DIR / f"{self.namespace}.uts"
        self._relay: subprocess.Popen[bytes] | None = None
        self._make(delay_s)

    def __repr__(self) -> str:
        return f"<Host {self.name} {self.address}>"

    def _make(self, delay_s: float) -> None:
        self.folder.mkdir(parents=True)
        etc = ETC_DIR / self.namespace
        etc.mkdir(parents=True)
        etc.joinpath("hosts").write_text(self._names)
        etc.joinpath("nsswitch.conf").write_text("hosts: files\n")  # no name server is reachable from here
        _ip("netns", "add", self.namespace)
        self._uts.touch()
        _call("unshare", f"--uts={self._uts}", "hostname", self.name)
        if delay_s:
            self._start_relay(delay_s)
        else:
            _ip(
                "link", "add", "eth0", "netns", self.namespace, "type", "veth", "peer", self.name, "netns", self._switch
            )
        _ip("-n", self._switch, "link", "set", self.name, "master", "switch", "up")
        _ip("-n", self.namespace, "link", "set", "lo", "up")
        _ip("-n", self.namespace, "address", "add", f"{self.address}/24", "dev", "eth0")
        _ip("-n", self.namespace, "link", "set", "eth0", "up")
        self.set_rate(self.rate)

    def _start_relay(self, delay_s: float) -> None:
        """Both ends of its cable are TAP devices, and a process carries frames between them, later."""
        ends = [str(NAMESPACES / self.namespace), "eth0", str(NAMESPACES / self._switch), self.name]
        script = str(Path(__file__).with_name("delay_relay.py"))
        self._relay = subprocess.Popen([sys.executable, script, str(delay_s), *ends], stdout=subprocess.PIPE)
        assert self._relay.stdout is not None
        if self._relay.stdout.readline() != b"ready\n":
            raise RuntimeError("the delay relay did not start")

    def set_rate(self, rate: str) -> None:
        """Each way, as `tc` spells it: `1gbit`, `200mbit`."""
        self.rate = rate
        self._shape("both")

    def _shape(self, direction: Direction) -> None:
        limits = ["tbf", "rate", self.rate, "burst", BURST, "latency", QUEUE]
        for namespace, device in self._ends(direction):
            _call("tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", *limits)

    def _ends(self, direction: Direction) -> list[tuple[str, str]]:
        out, into = (self.namespace, "eth0"), (self._switch, self.name)
        return {"out": [out], "in": [into], "both": [out, into]}[direction]

    # The cable

    def cut(self, direction: Direction = "both") -> None:
        """Nothing passes any more, and nobody is told: no reset, no error."""
        if direction == "both":
            _ip("-n", self._switch, "link", "set", self.name, "down")
            return
        for namespace, device in self._ends(direction):
            _call("tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", "blackhole")

    def heal(self) -> None:
        """The cable is whole again; nothing happens if it was."""
        self._shape("both")
        _ip("-n", self._switch, "link", "set", self.name, "up")

    # What runs on it

    def command(self, words: Sequence[str]) -> list[str]:
        return ["ip", "netns", "exec", self.namespace, "nsenter", f"--uts={self._uts}", *words]

    def environment(self, extra: Mapping[str, str] | None = None) -> dict[str, str]:
        """Ours, with this host's HOME and without a cluster of ours."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("RACIMO_", "RAY_"))}
        return kept | {"HOME": str(self.folder), "NO_COLOR": "1"} | dict(extra or {})

    def run(
        self, words: Sequence[str], *, timeout_s: float = 60.0, env: Mapping[str, str] | None = None, **kwargs: Any
    ) -> subprocess.CompletedProcess[str]:
        """Like `subprocess.run` with text and captured output, there. `env` is added to the host's environment."""
        kwargs = {"stdin": subprocess.DEVNULL} | kwargs if "input" not in kwargs else kwargs
        return subprocess.run(
            self.command(words), env=self.environment(env), capture_output=True, text=True, timeout=timeout_s, **kwargs
        )

    def popen(
        self, words: Sequence[str], *, env: Mapping[str, str] | None = None, **kwargs: Any
    ) -> "subprocess.Popen[Any]":
        return subprocess.Popen(self.command(words), env=self.environment(env), **kwargs)

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Sockets that this thread makes meanwhile belong to the host, and stay there."""
        own = os.open(f"/proc/self/task/{threading.get_native_id()}/ns/net", os.O_RDONLY)
        there = os.open(NAMESPACES / self.namespace, os.O_RDONLY)
        try:
            _enter(there)
            yield
        finally:
            _enter(own)
            os.close(own)
            os.close(there)

    def pids(self) -> list[int]:
        """Every process whose network is this host's."""
        found = subprocess.run(["ip", "netns", "pids", self.namespace], capture_output=True, text=True)
        return [int(word) for word in found.stdout.split() if int(word) != os.getpid()]

    def power_off(self) -> None:
        """Every process of the host is killed at once: each is frozen first, so that none sees another one die."""
        frozen: set[int] = set()
        while fresh := set(self.pids()) - frozen:
            _signal_all(fresh, signal.SIGSTOP)
            frozen |= fresh
        _signal_all(frozen, signal.SIGKILL)
        _wait_gone(self.namespace)


class Hosts:
    """`count` hosts on one switch. `rate`: of each cable. `delay_s`: one way, by host number (from 0) or for all."""

    def __init__(
        self,
        count: int,
        *,
        folder: Path | None = None,
        rate: str = GBIT,
        delay_s: float | Mapping[int, float] = 0.0,
    ) -> None:
        RUN_DIR.mkdir(mode=0o700, exist_ok=True)
        self.number, self._lock = _own_number()
        self.prefix = f"racimo-{self.number}"
        self.switch = f"{self.prefix}-switch"
        self._own_folder = folder is None
        self.folder = folder or Path(tempfile.mkdtemp(prefix=f"rh{self.number}-"))
        self._rate = rate
        addresses = [f"10.77.{self.number}.{host}\th{host}" for host in range(1, MOST_HOSTS + 1)]
        self.names = "\n".join(["127.0.0.1\tlocalhost", *addresses, ""])
        self._hosts: list[Host] = []
        try:
            _clear(self.prefix)
            _ip("netns", "add", self.switch)
            # A bridge with a fixed address: by default it takes that of its first port, and changes it.
            _ip("-n", self.switch, "link", "add", "switch", "address", "02:00:00:00:00:01", "type", "bridge")
            _ip("-n", self.switch, "link", "set", "switch", "up")
            for number in range(count):
                self.add(delay_s=delay_s.get(number, 0.0) if isinstance(delay_s, Mapping) else delay_s)
        except BaseException:
            self.close()
            raise

    def add(self, *, rate: str = "", delay_s: float = 0.0) -> Host:
        """One more host, plugged in. At most `MOST_HOSTS`."""
        number = len(self._hosts) + 1
        self._hosts.append(Host(self, number, self.folder / f"h{number}", rate or self._rate, delay_s))
        return self._hosts[-1]

    def __getitem__(self, index: int) -> Host:
        return self._hosts[index]

    def __iter__(self) -> Iterator[Host]:
        return iter(self._hosts)

    def index(self, host: Host) -> int:
        return self._hosts.index(host)

    def __len__(self) -> int:
        return len(self._hosts)

    def __enter__(self) -> "Hosts":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Ends what runs on the hosts, then the hosts. Safe to call twice."""
        _clear(self.prefix)
        for host in self._hosts:
            if host._relay is not None:
                host._relay.kill()
                host._relay.communicate()
        self._hosts.clear()
        if self._own_folder:
            shutil.rmtree(self.folder, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _own_number() -> tuple[int, int]:
    """A number that no other live stage has, and the lock that keeps it."""
    for number in range(1, MOST_STAGES + 1):
        fd = os.open(RUN_DIR / f"{number}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            continue
        return number, fd
    raise RuntimeError(f"{MOST_STAGES} stages of hosts exist on this machine already")


def _clear(prefix: str) -> None:
    """Whatever a stage of that name has, or had when it was killed."""
    for path in sorted(NAMESPACES.glob(f"{prefix}-*")):
        pids = _pids_in(path.name)
        _signal_all(pids, signal.SIGKILL)
        if pids:
            _wait_gone(path.name)
        subprocess.run(["ip", "netns", "delete", path.name], capture_output=True)
    for path in ETC_DIR.glob(f"{prefix}-*"):
        shutil.rmtree(path, ignore_errors=True)
    for path in RUN_DIR.glob(f"{prefix}-*.uts"):
        subprocess.run(["umount", str(path)], capture_output=True)
        path.unlink(missing_ok=True)


def _pids_in(namespace: str) -> set[int]:
    found = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True)
    return {int(word) for word in found.stdout.split()} - {os.getpid()}


def _wait_gone(namespace: str) -> None:
    deadline_s = time.monotonic() + SETTLE_S
    while (left := _pids_in(namespace)) and time.monotonic() < deadline_s:
        _signal_all(left, signal.SIGKILL)
        time.sleep(0.02)


def _signal_all(pids: set[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _enter(namespace: int) -> None:
    if _libc.setns(namespace, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns failed")


def _ip(*words: str) -> None:
    _call("ip", *words)


def _call(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip()}")
