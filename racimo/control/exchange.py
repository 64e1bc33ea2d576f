"""One request and its answer, as handlers see them: bounded bodies in, JSON, bytes or a stream of lines out."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Any, TypeVar
from urllib.parse import parse_qsl

import msgspec

from racimo.control.gate import Message, Receive, Scope, Send
from racimo.spec.errors import RacimoError

MAX_JSON_BYTES = 4 * 10**6
MAX_STREAMS = 64
"""Open streams of all clients together."""
KEEP_ALIVE_S = 15.0

T = TypeVar("T")


class Exchange:
    """`path` holds the parameters of the path, `query` those of the query."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, path: dict[str, str]) -> None:
        self._scope = scope
        self._receive = receive
        self.send = send
        self.path = path
        self.query = dict(parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True))

    def flag(self, name: str) -> bool:
        value = self.query.get(name, "0")
        if value not in ("0", "1", "true", "false"):
            raise RacimoError("invalid-request", f"{name} is 0 or 1, not {value!r}")
        return value in ("1", "true")

    def number(self, name: str, default: float, least: float, most: float) -> float:
        text = self.query.get(name)
        if text is None:
            return default
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not least <= value <= most:
            raise RacimoError("invalid-request", f"{name} is a number from {least:g} to {most:g}, not {text!r}")
        return value

    async def body_parts(self, most_bytes: int) -> AsyncGenerator[bytes, None]:
        """The body as it comes in. `RacimoError` upload-too-large, before reading where the length is said."""
        too_large = RacimoError("upload-too-large", f"the body of this request has at most {most_bytes} bytes")
        for name, value in self._scope["headers"]:
            if name.lower() == b"content-length" and (not value.isdigit() or int(value) > most_bytes):
                raise too_large
        size_bytes = 0
        while True:
            message = await self._receive()
            if message["type"] != "http.request":
                raise RacimoError("invalid-request", "the client left in the middle of its request")
            part = message.get("body", b"")
            size_bytes += len(part)
            if size_bytes > most_bytes:
                raise too_large
            if part:
                yield part
            if not message.get("more_body", False):
                return

    async def read(self, kind: type[T]) -> T:
        """The JSON body. `RacimoError`: invalid-spec for what is wrong within a spec, else invalid-request."""
        content = b"".join([part async for part in self.body_parts(MAX_JSON_BYTES)])
        try:
            return msgspec.json.decode(content, type=kind)
        except msgspec.ValidationError as error:
            text = str(error)
            code = "invalid-spec" if "`$.spec" in text else "invalid-request"
            raise RacimoError(code, text) from None
        except (msgspec.DecodeError, RecursionError) as error:
            raise RacimoError("invalid-request", f"the body is not JSON: {error}") from None

    async def answer(self, view: Any, status: int = 200) -> None:
        await self.answer_bytes(msgspec.json.encode(view), b"application/json", status)

    async def answer_bytes(self, content: bytes, kind: bytes, status: int = 200) -> None:
        headers = [(b"content-type", kind), (b"content-length", str(len(content)).encode())]
        headers.append((b"x-content-type-options", b"nosniff"))
        await self.send({"type": "http.response.start", "status": status, "headers": headers})
        await self.send({"type": "http.response.body", "body": content})

    async def answer_file(self, parts: AsyncGenerator[bytes, None], size_bytes: int) -> None:
        headers = [
            (b"content-type", b"application/octet-stream"),
            (b"content-length", str(size_bytes).encode()),
            (b"x-content-type-options", b"nosniff"),
            (b"content-security-policy", b"sandbox"),
        ]
        await self.send({"type": "http.response.start", "status": 200, "headers": headers})
        async with contextlib.aclosing(parts) as open_parts:
            async for part in open_parts:
                await self.send({"type": "http.response.body", "body": part, "more_body": True})
        await self.send({"type": "http.response.body", "body": b""})

    async def disconnected(self) -> None:
        """Returns when the client is gone."""
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                return


class Streams:
    """Answers with lines of JSON, at most `MAX_STREAMS` at once."""

    def __init__(self) -> None:
        self.num_open = 0

    async def answer(self, exchange: Exchange, items: AsyncGenerator[Any, None]) -> None:
        """One line per item (of a list: per element) until there are no more or the client is gone; an empty line
        after 15 s of silence.
        `RacimoError` busy."""
        if self.num_open >= MAX_STREAMS:
            raise RacimoError("busy", f"{MAX_STREAMS} streams are open, and no more may be", "end some `logs -f`")
        self.num_open += 1
        sending = asyncio.create_task(self._send_lines(exchange, items))
        gone = asyncio.create_task(exchange.disconnected())
        try:
            await asyncio.wait({sending, gone}, return_when=asyncio.FIRST_COMPLETED)
            over = sending.done()
        finally:
            self.num_open -= 1
            for task in (sending, gone):
                task.cancel()
            await asyncio.gather(sending, gone, return_exceptions=True)
        if over:
            sending.result()

    async def _send_lines(self, exchange: Exchange, items: AsyncGenerator[Any, None]) -> None:
        send = exchange.send
        await send(_stream_start())
        async with contextlib.aclosing(items) as source:
            following = asyncio.ensure_future(anext(source, None))
            try:
                while True:
                    done, _ = await asyncio.wait({following}, timeout=KEEP_ALIVE_S)
                    if not done:
                        await send({"type": "http.response.body", "body": b"\n", "more_body": True})
                        continue
                    item = following.result()
                    if item is None:
                        break
                    following = asyncio.ensure_future(anext(source, None))
                    several = item if isinstance(item, list) else [item]
                    lines = b"".join([msgspec.json.encode(one) + b"\n" for one in several])
                    await send({"type": "http.response.body", "body": lines, "more_body": True})
            finally:
                following.cancel()
                await asyncio.gather(following, return_exceptions=True)
        await send({"type": "http.response.body", "body": b""})


def _stream_start() -> Message:
    headers = [
        (b"content-type", b"application/x-ndjson"),
        (b"cache-control", b"no-store"),
        (b"x-accel-buffering", b"no"),
    ]
    return {"type": "http.response.start", "status": 200, "headers": headers}
