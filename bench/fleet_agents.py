"""Many simulated agents on the real link protocol, for `bench/fleet.py`: `python -m bench.fleet_agents`.

    --head IP:PORT --certificate PEM --token-file FILE --first N --count N

Each agent holds one TLS connection, beats as the control process tells it, answers what it is asked, and "starts"
workers by saying so; a worker ends when it is stopped. A dropped link is dialled anew. Moments are told on stdout, one
JSON object a line, on CLOCK_MONOTONIC: `{"linked": agent, "at_s"}` once the first events were asked for (so control has
taken up what the agent reported), `{"started": worker, "at_s"}` when the order to start a worker has come.
"""

import argparse
import asyncio
import json
import os
import random
import resource
import ssl
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from racimo.act.tls import client_context
from racimo.agent import protocol
from racimo.agent.frames import encode_frame, read_frame
from racimo.agent.protocol import LINK_ALPN
from racimo.spec.config import parse_address, parse_token
from racimo.state.events import WorkerExited, WorkerStarted
from racimo.state.nouns import Device, Exit, Node, parse_worker_id
from racimo.version import PROTOCOL_VERSION, __version__

DEVICES = 8
DIAL_AT_ONCE = 50
"""Handshakes under way per process: a fleet's machines do not boot within one millisecond either."""
BACKOFF_MOST_S = 1.0
FAKE_PID = 2**22
_decode = msgspec.msgpack.Decoder(protocol.Request).decode
_decode_hello = msgspec.msgpack.Decoder(protocol.LinkAccepted | protocol.Refused).decode


def tell(**words: Any) -> None:
    sys.stdout.write(json.dumps(words | {"at_s": time.monotonic()}) + "\n")
    sys.stdout.flush()


@dataclass
class FakeAgent:
    number: int
    token: str
    cluster: str = ""
    events: list[protocol.NumberedEvent] = field(default_factory=list)
    next_event: int = 1
    workers: dict[str, bool] = field(default_factory=dict)
    """Worker to whether it has exited."""
    fresh: asyncio.Event = field(default_factory=asyncio.Event)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """It has got work, which it beats at once."""

    @property
    def name(self) -> str:
        return f"fake-{self.number:04d}"

    def welcome(self) -> protocol.ControlWelcome:
        node = Node(
            id=self.name,
            host=self.name,
            devices=tuple(Device(index) for index in range(DEVICES)),
            memory_bytes=64 * 10**9,
            versions=versions(),
        )
        workers = tuple(
            protocol.WorkerState(worker=worker, pid=FAKE_PID, exited=exited) for worker, exited in self.workers.items()
        )
        return protocol.ControlWelcome(node=node, instance=f"{self.name}-{os.getpid()}", workers=workers)

    async def live(self, host: str, port: int, context: ssl.SSLContext, dialling: asyncio.Semaphore) -> None:
        delay_s = 0.05
        while True:
            try:
                async with dialling:
                    reader, writer = await asyncio.wait_for(
                        asyncio.open_connection(host, port, ssl=context, server_hostname=host), 30
                    )
                    accepted = await asyncio.wait_for(self._introduce(reader, writer), 30)
                delay_s = 0.05
                await self._serve(reader, writer, accepted)
            except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
                if delay_s >= BACKOFF_MOST_S:
                    tell(trouble=self.name, why=repr(error))
            await asyncio.sleep(delay_s * random.uniform(0.5, 1))
            delay_s = min(BACKOFF_MOST_S, 2 * delay_s)

    async def _introduce(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> protocol.LinkAccepted:
        hello = protocol.LinkHello(
            token=self.token,
            cluster=self.cluster,
            protocol=PROTOCOL_VERSION,
            wall_s=time.time(),
            welcome=self.welcome(),
        )
        writer.write(encode_frame(hello))
        body = await read_frame(reader)
        if body is None:
            raise ConnectionResetError("closed at hello")
        answer = _decode_hello(body)
        if isinstance(answer, protocol.Refused):
            raise ConnectionRefusedError(f"{answer.code}: {answer.message}")
        self.cluster = answer.cluster
        return answer

    async def _serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, accepted: protocol.LinkAccepted
    ) -> None:
        told = False
        tasks: set[asyncio.Task[None]] = set()
        beats = asyncio.create_task(self._beat(writer, accepted))
        try:
            while (body := await read_frame(reader)) is not None:
                request = _decode(body)
                if isinstance(request.body, protocol.PullEvents) and not told:
                    told = True
                    tell(linked=self.name)
                task = asyncio.create_task(self._answer(writer, request))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
        finally:
            beats.cancel()
            for task in tasks:
                task.cancel()
            writer.close()

    async def _beat(self, writer: asyncio.StreamWriter, accepted: protocol.LinkAccepted) -> None:
        number = 0
        while True:
            next_s = accepted.beat_idle_s if all(self.workers.values()) else accepted.beat_busy_s
            number += 1
            writer.write(encode_frame(protocol.Reply(0, protocol.Beat(number=number, next_s=next_s))))
            try:
                await asyncio.wait_for(self.changed.wait(), next_s)
            except TimeoutError:
                pass
            self.changed.clear()

    async def _answer(self, writer: asyncio.StreamWriter, request: protocol.Request) -> None:
        reply = await self._reply(request.body)
        if not writer.is_closing():
            writer.write(encode_frame(protocol.Reply(request.id, reply)))

    async def _reply(self, body: protocol.RequestBody) -> protocol.ReplyBody:
        match body:
            case protocol.StartWorker():
                tell(started=body.order.worker)
                self._start(body.order.worker)
                return protocol.StartReply()
            case protocol.StopWorker():
                self._stop(body.worker)
                return protocol.Ok()
            case protocol.PullEvents():
                return await self._pull(body)
            case protocol.PullProgress():
                await asyncio.sleep(body.wait_s)
                return protocol.ProgressBatch(number=body.after, progress=())
            case protocol.PullLogs():
                await asyncio.sleep(body.wait_s)
                return protocol.LogBatch(next=body.after)
            case protocol.ReadReports():
                return protocol.ReportBatch(next=body.after, reports=())
            case protocol.ListOutputs():
                return protocol.OutputList()
            case protocol.ReadLog():
                return protocol.LogChunk(offset=0, content=b"", ended=True)
            case protocol.FindModules():
                return protocol.ModulesReply()
            case protocol.FetchBlobs():
                return protocol.FetchReply()
            case protocol.ProbePeer():
                return protocol.ProbeReply(latency_s=1e-4, bandwidth_bytes_per_s=1e8)
            case protocol.Usage():
                return protocol.UsageReply(processes=(), free_memory_bytes=10**9, free_disk_bytes=10**9)
            case _:
                return protocol.Ok()

    def _start(self, worker: str) -> None:
        if worker not in self.workers:
            self.workers[worker] = False
            self.changed.set()
            run, attempt, index = parse_worker_id(worker)
            self._happened(WorkerStarted(run=run, attempt=attempt, index=index, pid=FAKE_PID))

    def _stop(self, worker: str) -> None:
        if self.workers.get(worker) is False:
            self.workers[worker] = True
            run, attempt, index = parse_worker_id(worker)
            exit = Exit(outcome="killed", signal=15, held_s=1.0)
            self._happened(WorkerExited(run=run, attempt=attempt, index=index, exit=exit))

    def _happened(self, event: protocol.AgentEvent) -> None:
        self.events.append(protocol.NumberedEvent(self.next_event, event))
        self.next_event += 1
        self.fresh.set()

    async def _pull(self, body: protocol.PullEvents) -> protocol.EventBatch:
        for numbered in self.events:
            if numbered.number <= body.after and isinstance(numbered.event, WorkerExited):
                event = numbered.event
                self.workers.pop(f"{event.run}/{event.attempt}/{event.index}", None)
        self.events = [numbered for numbered in self.events if numbered.number > body.after]
        if not self.events:
            self.fresh.clear()
            try:
                await asyncio.wait_for(self.fresh.wait(), body.wait_s)
            except TimeoutError:
                pass
        return protocol.EventBatch(events=tuple(self.events[: body.limit]))


def versions() -> dict[str, str]:
    """Those of this machine, which the head's agent reports as well."""
    import importlib.metadata
    import platform

    return {
        "python": platform.python_version(),
        "racimo": __version__,
        "torch": importlib.metadata.version("torch"),
    }


async def run(head: str, certificate: bytes, token: str, first: int, count: int) -> None:
    host, port = parse_address(head)
    context = client_context(certificate, (LINK_ALPN,))
    dialling = asyncio.Semaphore(DIAL_AT_ONCE)
    agents = [FakeAgent(number, token) for number in range(first, first + count)]
    await asyncio.gather(*(agent.live(host, port, context, dialling) for agent in agents))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--head", required=True)
    parser.add_argument("--certificate", type=Path, required=True)
    parser.add_argument("--token-file", type=Path, required=True)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, required=True)
    asked = parser.parse_args()
    wanted = asked.count + 100
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(wanted, hard), hard))
    token = parse_token(asked.token_file.read_text()).secret
    asyncio.run(run(asked.head, asked.certificate.read_bytes(), token, asked.first, asked.count))


if __name__ == "__main__":
    main()
