"""What the control process reads from a node: logs (and commits) of workers, and what runs left in their outputs."""

import asyncio
import time

from racimo.agent.inotify import FileWatcher
from racimo.agent.log_tails import LogTails
from racimo.agent.logs import read_log
from racimo.agent.outputs import check_run_name, files_beside, list_outputs, read_output
from racimo.agent.protocol import ListOutputs, LogChunk, OutputList, PullLogs, ReadLog, ReadOutput, ReplyBody
from racimo.agent.runs import Runs
from racimo.agent.workers import Workers
from racimo.spec.errors import RacimoError
from racimo.spec.home import Home

MAX_WAIT_S = 60.0
MAX_LOG_CHUNK_BYTES = 4 * 2**20
FILES = {"out": "out.log", "err": "err.log", "steps": "steps.jsonl"}


class Reading:
    """One handler per request. Nothing is changed by any."""

    def __init__(self, home: Home, workers: Workers, runs: Runs, files: FileWatcher) -> None:
        self._home, self._workers, self._files = home, workers, files
        self._tails = LogTails(workers, runs, files)

    def close(self) -> None:
        self._tails.close()

    async def read_log(self, message: ReadLog) -> ReplyBody:
        """A chunk, once there is one or the worker has ended. `RacimoError` not-found for an unknown worker."""
        directory = self._home.worker_dir(message.worker)
        if not directory.is_dir():
            raise RacimoError("not-found", f"this node has no worker {message.worker}")
        path = directory / FILES[message.stream]
        limit = min(max(message.limit, 1), MAX_LOG_CHUNK_BYTES)
        deadline_s = time.monotonic() + min(message.wait_s, MAX_WAIT_S)
        entry = self._workers.entries.get(message.worker)
        begin, content = read_log(path, message.offset, limit)
        if not content and message.wait_s > 0 and entry is not None and entry.live:
            with self._files.watch(directory) as watch:
                # A worker's end beats the same pulse, so that a follower learns of it at once.
                entry.followers.add(watch.pulse)
                try:
                    begin, content = read_log(path, message.offset, limit)
                    while not content and entry.live and (left_s := deadline_s - time.monotonic()) > 0:
                        await watch.pulse.wait(left_s)
                        begin, content = read_log(path, message.offset, limit)
                finally:
                    entry.followers.discard(watch.pulse)
        over = entry is None or not entry.live
        ended = over and not read_log(path, begin + len(content), 1)[1]
        return LogChunk(offset=begin, content=content, ended=ended)

    async def pull_logs(self, message: PullLogs) -> ReplyBody:
        return await self._tails.pull(message)

    async def list_outputs(self, message: ListOutputs) -> ReplyBody:
        check_run_name(message.run)
        files = await asyncio.to_thread(list_outputs, self._home.output_dir(message.run))
        beside = await asyncio.to_thread(files_beside, self._home, message.run)
        return OutputList(files=tuple(files), beside=tuple(beside))

    async def read_output(self, message: ReadOutput) -> ReplyBody:
        check_run_name(message.run)
        root = self._home.output_dir(message.run)
        return await asyncio.to_thread(read_output, root, message.path, message.offset, message.limit)
