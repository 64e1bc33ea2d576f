"""`env:` requirement lists, built once per node and content; the environments share the cluster's torch."""

import asyncio
import fcntl
import functools
import hashlib
import os
import platform
import shutil
import signal
import sys
import sysconfig
import time
from pathlib import Path

import msgspec

from racimo.agent.processes import set_parent_death_signal
from racimo.state.nouns import Failure

BUILD_TIMEOUT_S = 1800.0
SHOWN_LOG_LINES = 12
MAX_SHOWN_BYTES = 4_000
SHOWN_LINE_CHARS = 120
COMPLETE_FILE = ".complete"
PARENT_FILE = "_racimo_parent.pth"
HASH_CHARS = 12


class Environment(msgspec.Struct, frozen=True):
    """A built environment. `hash` is "" for the cluster's own interpreter."""

    hash: str
    python: Path

    @property
    def bin_dir(self) -> Path:
        return self.python.parent


class EnvironmentFailed(Exception):
    """The build failed; `failure` has the last lines of its log."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class Environments:
    """The environments below one folder, by hash of requirements and interpreter."""

    def __init__(self, root: Path, host: str) -> None:
        self._root, self._host = root, host
        self._building: dict[str, asyncio.Task[Environment]] = {}
        self._begun_s: dict[str, float] = {}
        """Of those that are being built: since when, on CLOCK_MONOTONIC."""

    @property
    def warnings(self) -> tuple[str, ...]:
        """What runs wait for here: one sentence for each environment that is being built."""
        return tuple(self._words(key, begun_s) for key, begun_s in self._begun_s.items())

    def _words(self, key: str, begun_s: float) -> str:
        passed_s = time.monotonic() - begun_s
        return f"{self._host} has been building the environment {key} for {passed_s:.0f} s{self._newest_line(key)}"

    def _newest_line(self, key: str) -> str:
        """What the installer said last."""
        try:
            with open(self._root / f"{key}.log", "rb") as log:
                log.seek(max(0, os.fstat(log.fileno()).st_size - MAX_SHOWN_BYTES))
                lines = log.read().decode(errors="replace").split("\n")
        except OSError:
            return ""
        said = [line.strip() for line in lines if line.strip() and not line.startswith("$ ")]
        return f": {said[-1][:SHOWN_LINE_CHARS]}" if said else ""

    async def get(self, requirements: str) -> Environment:
        """The environment, built now if it is not there. `EnvironmentFailed`, `OSError`."""
        if not requirements.strip():
            return Environment("", Path(sys.executable))
        identity = f"{platform.python_version()}\n{sys.prefix}\n{requirements}"
        key = hashlib.sha256(identity.encode()).hexdigest()[:HASH_CHARS]
        if key not in self._building:
            self._building[key] = asyncio.create_task(self._build(key, requirements), name=f"environment {key}")
        task = self._building[key]
        try:
            return await asyncio.shield(task)
        finally:
            if task.done():
                self._building.pop(key, None)

    async def _build(self, key: str, requirements: str) -> Environment:
        folder = self._root / key
        environment = Environment(key, folder / "bin" / "python")
        if (folder / COMPLETE_FILE).exists():
            return environment
        self._root.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = os.open(self._root / f"{key}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._begun_s[key] = time.monotonic()
        try:
            # Free at once: an agent holds it for life, and the kernel ends its installers with it.
            await asyncio.to_thread(fcntl.flock, lock, fcntl.LOCK_EX)
            if not (folder / COMPLETE_FILE).exists():
                await self._install(folder, requirements)
                (folder / COMPLETE_FILE).touch()
        finally:
            del self._begun_s[key]
            os.close(lock)
        return environment

    async def _install(self, folder: Path, requirements: str) -> None:
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        log_file = folder.with_suffix(".log")
        log_file.unlink(missing_ok=True)
        requirements_file = folder.with_suffix(".txt")
        requirements_file.write_text(requirements)
        python = folder / "bin" / "python"
        await self._step(log_file, sys.executable, "-m", "venv", "--without-pip", os.fspath(folder))
        site_packages = folder / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
        # `addsitedir` also obeys the parent's own .pth files (an editable install of ours); it comes last in the path.
        parent = sysconfig.get_path("purelib")
        (site_packages / PARENT_FILE).write_text(f"import site; site.addsitedir({parent!r})\n")
        await self._step(log_file, *_installer(python), "-r", os.fspath(requirements_file))

    async def _step(self, log_file: Path, *command: str) -> None:
        with open(log_file, "ab") as log:
            log.write(f"$ {' '.join(command)}\n".encode())
            log.flush()
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self._root,
                preexec_fn=functools.partial(set_parent_death_signal, signal.SIGKILL),
            )
        try:
            async with asyncio.timeout(BUILD_TIMEOUT_S):
                code = await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()
            code = -1
        if code != 0:
            raise EnvironmentFailed(self._failure(log_file, code))

    def _failure(self, log_file: Path, code: int) -> Failure:
        lines = log_file.read_text(errors="replace").strip().splitlines()[-SHOWN_LOG_LINES:]
        how = f"exit code {code}" if code >= 0 else f"no end after {BUILD_TIMEOUT_S:.0f} s"
        errors = [line for line in lines if "error" in line.lower()] or lines
        return Failure(
            code="environment-failed",
            message=f"the environment could not be built on {self._host} ({how}): {errors[0] if errors else ''}",
            hint=f"the whole log is in {log_file}",
            traceback="\n".join(lines)[-MAX_SHOWN_BYTES:],
        )


def _installer(python: Path) -> tuple[str, ...]:
    uv = shutil.which("uv")
    if uv is not None:
        return (uv, "pip", "install", "--python", os.fspath(python))
    return (sys.executable, "-m", "pip", "--python", os.fspath(python), "install", "--no-input")
