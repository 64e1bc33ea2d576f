"""`python -m racimo.control --home DIR`: the control process of one cluster."""

import argparse
import asyncio
import fcntl
import logging
import os
import resource
import secrets as token_source
import signal
import socket
import sys
from pathlib import Path

import msgspec

from racimo.act import guardian
from racimo.act.allocator import give_back_freed_memory
from racimo.act.journal import Journal, SqliteJournal
from racimo.act.versions import own_versions
from racimo.control import service_log
from racimo.control.api import Api
from racimo.control.carrier import Carrier
from racimo.control.clock import ClusterClock
from racimo.control.core import Core
from racimo.control.gate import Gate
from racimo.control.home_check import check_home
from racimo.control.link_door import LinkDoor
from racimo.control.link_rules import House
from racimo.control.loop import Loop
from racimo.control.private_files import write_private
from racimo.control.proposing import Proposing
from racimo.control.routes import Dispatcher
from racimo.control.secrets import SecretStore
from racimo.control.server import HOST, Server, listen
from racimo.control.snapshots import SnapshotStore
from racimo.control.supervisor import EXIT_REFUSED
from racimo.spec.config import ClusterFile, parse_address, parse_token, read_config
from racimo.spec.errors import RacimoError
from racimo.spec.home import Home
from racimo.version import __version__

REST_MOST_S = 40.0

log = logging.getLogger("racimo.control")


class Identity(msgspec.Struct, frozen=True):
    """What stays the same across restarts: the cluster's id and, if it is free, its port."""

    id: str
    port: int = 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m racimo.control", description=__doc__)
    parser.add_argument("--home", type=Path, required=True)
    home = Home(parser.parse_args().home.absolute())
    try:
        check_home(home)
        for folder in (home.service_logs_dir, home.processes_dir, home.journal_file.parent):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        service_log.set_up(home.service_logs_dir / "control.log")
        lock = _lock(home)
        _write_record(home)
        _raise_open_files()
        give_back_freed_memory()
        asyncio.run(ControlProcess(home).run())
        os.close(lock)
    except RacimoError as error:
        print(f"racimo.control: {error.message} [{error.code}] {error.hint}", file=sys.stderr)
        return EXIT_REFUSED if error.code != "disk-full" else 1
    return 0


def _lock(home: Home) -> int:
    """One control process per home; another that just died may hold the lock for a moment longer."""
    fd = os.open(home.journal_file.parent / "control.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise SystemExit(f"racimo.control: another control process works on {home.root}") from None
    return fd


def _write_record(home: Home) -> None:
    try:
        guardian.write_record(home.root, "control")
    except OSError as error:  # a full disk; the supervisor knows this process as its child
        log.warning("cannot record this process: %s", error.strerror)


def _raise_open_files() -> None:
    """Each node and each client is a descriptor, and the usual limit is 1,024."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


class ControlProcess:
    """Puts the parts of one cluster together and runs them until it is asked to end."""

    def __init__(self, home: Home) -> None:
        self.home = home
        self.identity = self._identify()
        self.token = self._read_token()
        store: Journal = SqliteJournal(home.journal_file)
        self.secrets = SecretStore(home.secrets_file)
        self.snapshots = SnapshotStore(home.blobs_dir, home.snapshots_dir)
        self.core = Core(store, ClusterClock())
        self.snapshots.collect({run.spec.snapshot for run in self.core.state.runs.values()})
        self.core.clock = ClusterClock(self.core.state.at_s)
        self.carrier = Carrier(home, self.identity.id, self.secrets, self.snapshots)
        self.loop = Loop(self.core, self.carrier.carry)
        self.carrier.loop = self.loop
        self._end = asyncio.Event()
        self._whole_cluster = False

    async def run(self) -> None:
        """Until SIGTERM (this process alone, to be started again) or a shutdown of the cluster."""
        for note in self.core.notes:
            log.warning("%s", note)
        event_loop = asyncio.get_running_loop()
        listener = listen(self.identity.port)
        address = f"http://{HOST}:{listener.getsockname()[1]}"
        bind = read_config(self.home).bind
        api = Api(
            self.home, self.identity.id, address, self.loop, self.carrier, self.secrets, self.snapshots, self.shut_down
        )
        dispatcher = Dispatcher(api)
        server = Server(Gate(dispatcher, self.token))
        # A server of its own: strangers who fill the open port's connections leave those of this machine alone.
        names = (parse_address(bind)[0],) if bind else ()
        outer = Server(Gate(dispatcher, self.token, names, socket.gethostname()))
        self.door = LinkDoor(self.home, self.carrier, self._house, outer.protocol)
        event_loop.add_signal_handler(signal.SIGTERM, self._terminate)
        event_loop.add_signal_handler(signal.SIGINT, self._terminate)
        watcher = guardian.watch(self.home.root, event_loop, log.warning)
        serving = asyncio.create_task(server.serve([listener]), name="server")
        parts = [
            asyncio.create_task(self.loop.run(), name="loop"),
            asyncio.create_task(self.carrier.run(), name="carrier"),
            asyncio.create_task(api.mirror.run(), name="mirror"),
            asyncio.create_task(Proposing(self.loop, self.carrier, self.secrets).run(), name="proposing"),
        ]
        if bind:
            parts.append(asyncio.create_task(self.door.run(bind), name="door"))
        self.core.come_up()
        self._announce(address, listener.getsockname()[1])
        log.info("taking requests at %s, %d runs known", address, len(self.core.state.runs))
        ending = asyncio.create_task(self._end.wait())
        try:
            await asyncio.wait({ending, serving, *parts}, return_when=asyncio.FIRST_COMPLETED)
            if self._whole_cluster:
                await self._rest()
                await self.carrier.shut_down()
        finally:
            server.stop()
            outer.drop()
            for part in parts:
                part.cancel()
            results = await asyncio.gather(serving, *parts, return_exceptions=True)
            await self.loop.close()
            if watcher is not None:
                watcher.close()
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, asyncio.CancelledError):
                raise result
        if self._whole_cluster:
            self.home.cluster_file.unlink(missing_ok=True)
        log.info("ended")

    def _house(self) -> House:
        return House(
            secret=self.token, cluster=self.identity.id, local_node=self.carrier.local_node, versions=own_versions()
        )

    async def _rest(self) -> None:
        """Waits (bounded) until every worker has saved or stopped; the agent ends those that take longer."""
        try:
            taken = await self.loop.change(lambda core: core.take_down())
        except RacimoError as error:  # a full disk: nobody can be told more than that it ends
            log.warning("going down without a word to the runs: %s", error.message)
            return
        waits = {
            asyncio.create_task(self._await_workers((*taken.kept, *taken.stopped)), name="rest"),
            asyncio.create_task(self.carrier.lost(), name="agent lost"),
        }
        done, pending = await asyncio.wait(waits, timeout=REST_MOST_S, return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()
        if not done:
            log.warning("some workers took longer than %g s to save or stop", REST_MOST_S)

    async def _await_workers(self, runs: tuple[str, ...]) -> None:
        for run in runs:
            while True:
                pulse = self.loop.pulse(run)
                if not self.core.reachable_workers(run):
                    break
                await pulse.wait()

    def shut_down(self) -> None:
        """Ends the cluster. The mark comes first: with it nobody starts anything again, whoever dies from here on."""
        (self.home.processes_dir / guardian.SHUTDOWN_MARK).touch(mode=0o600)
        self._whole_cluster = True
        self._end.set()

    def _terminate(self) -> None:
        self._whole_cluster = (self.home.processes_dir / guardian.SHUTDOWN_MARK).exists()
        self._end.set()

    def _identify(self) -> Identity:
        path = self.home.journal_file.parent / "identity.json"
        try:
            return msgspec.json.decode(path.read_bytes(), type=Identity)
        except FileNotFoundError:
            identity = Identity(id=token_source.token_hex(8))
        except msgspec.MsgspecError as error:
            raise RacimoError("start-failed", f"{path} is not readable: {error}", f"rm {path}") from error
        write_private(path, msgspec.json.encode(identity))
        return identity

    def _read_token(self) -> str:
        """The secret of the token that `racimo up` made, or a new one."""
        try:
            text = self.home.token_file.read_text().strip()
        except FileNotFoundError:
            text = ""
        token = parse_token(text).secret if text else ""
        if not token:
            token = token_source.token_urlsafe(32)
            write_private(self.home.token_file, token.encode())
        return token

    def _announce(self, address: str, port: int) -> None:
        if port != self.identity.port:
            path = self.home.journal_file.parent / "identity.json"
            write_private(path, msgspec.json.encode(Identity(self.identity.id, port)))
        content = msgspec.json.encode(ClusterFile(self.identity.id, address, __version__))
        if not self.home.cluster_file.exists() or self.home.cluster_file.read_bytes() != content:
            write_private(self.home.cluster_file, content)


if __name__ == "__main__":
    sys.exit(main())
