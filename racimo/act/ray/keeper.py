"""Keeps this machine's part of Ray running, for ever: at the head its directory and the driver of the relays, elsewhere
the part that joins it. Whatever becomes of it, the node works on without.
"""

import asyncio
import importlib.util
import logging
import os
import shutil
import sys
import time
from asyncio.subprocess import Process

import msgspec

from racimo.act.guardian import next_delay_s
from racimo.act.ray import place as places
from racimo.act.ray.accounts import Said
from racimo.act.ray.family import DRIVER, ENGINE, GRACE_S, Family, children
from racimo.act.ray.words import why_it_ended
from racimo.act.ray_status import RayPort, RayState, RayStatus
from racimo.agent.discovery import discover_node
from racimo.agent.inotify import FileWatcher
from racimo.agent.private_folder import make_private_folder
from racimo.agent.whole_file import write_whole
from racimo.spec.config import read_config
from racimo.spec.errors import RacimoError
from racimo.spec.home import Home

START_MOST_S = 90.0
"""A Ray that has not started by then is started anew."""
LOOK_S = 0.25
"""Between looks at the parts of a Ray that is starting."""
DELAY_MOST_S = 15.0
STABLE_AFTER_S = 30.0
"""A Ray that lived this long is started again at once."""
FAILURES_MOST = 4
"""After so many vain starts in a row the head's Ray loses its memory."""
HEAD_TRY_S = 2.0
DRIVER_SILENT_S = 60.0
"""A driver that says nothing for this long (it is to speak every 15 s) hangs, and is started again."""
OUTPUT_TAIL_BYTES = 20_000
CORE_PARTS = frozenset({"raylet", "gcs_server"})
"""The kernel's names of the processes without any of which Ray is not up."""

log = logging.getLogger("racimo.ray")


_SAID = msgspec.json.Decoder(Said)


class Keeper:
    def __init__(self, home: Home) -> None:
        self._home = home
        self._family = Family(home.root)
        self._status: RayStatus | None = None
        self._delay_s = 0.0
        self._failures = 0
        self.stopped = asyncio.Event()

    async def run(self) -> None:
        """Until `stopped` is set; leaves no process behind."""
        keeping = asyncio.create_task(self._keep(), name="ray")
        stopping = asyncio.create_task(self.stopped.wait(), name="stop")
        await asyncio.wait({keeping, stopping}, return_when=asyncio.FIRST_COMPLETED)
        failed = keeping.done()
        keeping.cancel()
        stopping.cancel()
        await asyncio.gather(keeping, stopping, return_exceptions=True)
        # A node says goodbye, or Ray would look for it for 15 s; a head has nobody to say it to.
        await self._family.end(GRACE_S if self._home.join_file.exists() else 0.0)
        if not self.stopped.is_set() and failed:
            keeping.result()  # what broke, for the log
        (self._home.node_dir / "ray.json").unlink(missing_ok=True)

    async def _keep(self) -> None:
        await self._node_named()
        while True:
            began_s = time.monotonic()
            try:
                reason = await self._once()
            except RacimoError as error:
                reason = error.message
            except OSError as error:  # no space, no more processes: tried again like the rest
                reason = f"Ray could not be started: {error.strerror}"
            await self._family.end(0.0)
            if time.monotonic() - began_s >= STABLE_AFTER_S:
                self._delay_s = 0.0
            self._say("down", reason)
            await asyncio.sleep(self._delay_s)
            self._delay_s = next_delay_s(self._delay_s or 0.5, DELAY_MOST_S)

    def _drop_state(self) -> None:
        """What the head's Ray keeps on disk may be what it dies of, and holds nothing that is not made again."""
        state = places.folder(self._home) / "state"
        if state.exists():
            log.warning("Ray could not start %d times: it begins anew, without what it knew", self._failures)
            shutil.rmtree(state, ignore_errors=True)
        self._failures = 0

    async def _node_named(self) -> None:
        """Waits for the agent's first start, which draws the node's id."""
        watcher = FileWatcher()
        try:
            with watcher.watch(self._home.node_dir) as folder:
                while not (self._home.node_dir / "id").exists():
                    await folder.pulse.wait(START_MOST_S)
        finally:
            watcher.close()

    async def _once(self) -> str:
        """One life of Ray here: the sentence that says how it ended. `RacimoError`, `OSError`: it could not begin."""
        if importlib.util.find_spec("ray") is None:
            raise RacimoError("start-failed", "Ray is not installed here (pip install ray)")
        await self._family.end(0.0)  # of a keeper that was killed
        place = places.read_place(self._home)
        if place.is_head:
            if not places.is_free(place.head_port):
                raise RacimoError(
                    "start-failed", f"port {place.head_port}, which Ray needs, is taken by another program"
                )
        else:
            await self._head_answers(place)
        block = places.choose_block(self._home, place)
        self._say("starting", address=place.address)
        self._tidy()
        config = read_config(self._home)
        node = discover_node(self._home, config.slots, config.price)
        environment = places.environment(self._home, places.write_ray_token(self._home))
        output = places.folder(self._home) / "output.log"
        began_s = time.monotonic()
        with open(output, "wb") as file:
            command = places.start_command(self._home, place, node, block)
            engine = await self._family.start(ENGINE, command, environment, file)
        code = await self._live(engine, place, block, environment)
        assert self._status is not None
        self._failures = self._failures + 1 if self._status.state == "starting" else 0
        if self._failures == FAILURES_MOST:
            self._drop_state()
        with open(output, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - OUTPUT_TAIL_BYTES))
            said = file.read().decode(errors="replace")
        return why_it_ended(said, code, time.monotonic() - began_s)

    async def _head_answers(self, place: places.Place) -> None:
        """Waits for the head's Ray: a try costs a packet here, and a second of work if Ray itself were started."""
        delay_s = 0.0
        while True:
            try:
                async with asyncio.timeout(HEAD_TRY_S):
                    _, writer = await asyncio.open_connection(place.head_host, place.head_port)
            except (OSError, TimeoutError):
                self._say("waiting", "the head's Ray does not answer", address=place.address)
                delay_s = next_delay_s(delay_s, HEAD_TRY_S)
                await asyncio.sleep(delay_s)
                continue
            writer.close()
            return

    def _tidy(self) -> None:
        """Makes the folder of Ray's sockets and logs ours, and drops what earlier lives left in it; the word of the
        last address, too, which would keep the head from starting there again."""
        folder = places.session_folder(self._home)
        make_private_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        (folder / places.STARTED_FILE).unlink(missing_ok=True)
        sessions = sorted(folder.glob("session_2*"), key=lambda session: session.name)
        for session in sessions[:-1]:  # the last one's logs say why it ended
            shutil.rmtree(session, ignore_errors=True)

    async def _live(self, engine: Process, place: places.Place, block: int, environment: dict[str, str]) -> int | None:
        """Until a part of Ray ends. Its exit code, None if the process around it still lives."""
        watching: list[asyncio.Task[object]] = [asyncio.create_task(engine.wait(), name="engine")]
        try:
            up = asyncio.create_task(self._started(engine.pid), name="started")
            watching.append(up)
            await asyncio.wait(watching, return_when=asyncio.FIRST_COMPLETED, timeout=START_MOST_S)
            if engine.returncode is not None or (up.done() and not up.result()):
                return engine.returncode
            if not up.done():
                raise RacimoError("start-failed", f"Ray did not start within {START_MOST_S:g} s")
            self._say("up", address=place.address, ports=places.ports(place, block))
            watching.remove(up)
            core = [pid for pid, name in children(engine.pid) if name in CORE_PARTS]
            watching += [asyncio.create_task(_end_of(pid), name=f"end of {pid}") for pid in core]
            if place.is_head:
                watching.append(asyncio.create_task(self._drive(environment), name="driver"))
            done, _ = await asyncio.wait(watching, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            return engine.returncode
        finally:
            for task in watching:
                task.cancel()
            await asyncio.gather(*watching, return_exceptions=True)

    async def _started(self, engine: int) -> bool:
        """Waits until Ray says that it has started. False if a part has died first, which Ray would wait for."""
        folder, seen = places.session_folder(self._home), set[int]()
        watcher = FileWatcher()
        try:
            with watcher.watch(folder) as watch:
                while not (folder / places.STARTED_FILE).exists():
                    core = {pid for pid, name in children(engine) if name in CORE_PARTS}
                    if seen - core:
                        return False
                    seen = core
                    await watch.pulse.wait(LOOK_S)
        finally:
            watcher.close()
        return True

    async def _drive(self, environment: dict[str, str]) -> None:
        """Keeps the driver of the relays running as long as Ray does."""
        delay_s = 0.0
        while True:
            began_s = time.monotonic()
            with open(places.folder(self._home) / "driver.log", "wb") as file:
                command = [sys.executable, "-P", "-m", "racimo.act.ray.driver", "--home", os.fspath(self._home.root)]
                driver = await self._family.start(DRIVER, command, environment, file, piped=True)
            try:
                await self._hear(driver)
            finally:
                if driver.returncode is None:
                    driver.kill()
                    await driver.wait()
            if time.monotonic() - began_s >= STABLE_AFTER_S:
                delay_s = 0.0
            log.warning("the driver of the relays ended (exit code %s); again in %g s", driver.returncode, delay_s)
            await asyncio.sleep(delay_s)
            delay_s = next_delay_s(delay_s or 0.5, DELAY_MOST_S)

    async def _hear(self, driver: Process) -> None:
        assert driver.stdout is not None
        while True:
            try:
                async with asyncio.timeout(DRIVER_SILENT_S):
                    line = await driver.stdout.readline()
                relays = _SAID.decode(line).relays if line else None
            except (TimeoutError, ValueError):
                log.warning("the driver of the relays is silent")
                return
            if relays is None:
                return
            assert self._status is not None
            self._write(msgspec.structs.replace(self._status, relays=relays))

    def _say(self, state: RayState, reason: str = "", address: str = "", ports: tuple[RayPort, ...] = ()) -> None:
        """`since_wall_s` is when it came up or went down, however often it was tried meanwhile; a new try keeps the
        reason of the last one."""
        before, since_wall_s = self._status, time.time()
        if before is not None and before.state != "up" and state != "up":
            since_wall_s, reason = before.since_wall_s, reason or before.reason
        if before is not None and (before.state, before.reason) == (state, reason):
            return
        log.info("%s%s", state, f": {reason}" if reason else "")
        self._write(RayStatus(state=state, since_wall_s=since_wall_s, reason=reason, address=address, ports=ports))

    def _write(self, status: RayStatus) -> None:
        if status == self._status:
            return
        self._status = status
        try:
            write_whole(self._home.node_dir / "ray.json", msgspec.json.encode(status))
        except OSError as error:  # a full disk must not end Ray as well
            log.error("ray.json could not be written: %s", error.strerror)


async def _end_of(pid: int) -> None:
    """Waits for the end of a process that may not be this one's child."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    loop = asyncio.get_running_loop()
    over = asyncio.Event()
    loop.add_reader(pidfd, over.set)
    try:
        await over.wait()
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)
