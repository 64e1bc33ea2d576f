"""One connection with the control process, whoever made it: its requests are answered, several at a time."""

import asyncio
import sys
from collections.abc import Awaitable, Callable

import msgspec

from racimo.agent.frames import encode_frame, read_frame
from racimo.agent.protocol import Beat, Refused, Reply, ReplyBody, Request, RequestBody
from racimo.spec.errors import ERROR_KINDS, RacimoError

MAX_REQUESTS_IN_FLIGHT = 256

_REQUEST = msgspec.msgpack.Decoder(Request)

Answer = Callable[[RequestBody], Awaitable[ReplyBody]]


async def answer_requests(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    answer: Answer,
    heard: Callable[[], None] = lambda: None,
) -> None:
    """Until the other side closes; what is in flight then is given up. `heard` is called with each frame.

    Raises `FrameError` and `msgspec.DecodeError` for what is no request.
    """
    tasks: set[asyncio.Task[None]] = set()
    try:
        while (body := await read_frame(reader)) is not None:
            heard()
            request = _REQUEST.decode(body)
            if len(tasks) >= MAX_REQUESTS_IN_FLIGHT:
                send_reply(writer, request.id, Refused(code="busy", message=f"{len(tasks)} requests are in flight"))
                continue
            task = asyncio.create_task(_answer_one(request, writer, answer))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
    finally:
        for task in tasks:
            task.cancel()


async def _answer_one(request: Request, writer: asyncio.StreamWriter, answer: Answer) -> None:
    try:
        reply = await answer(request.body)
    except RacimoError as error:
        reply = Refused(code=error.code, message=error.message, hint=error.hint)
    except OSError as error:
        code = "disk-full" if error.errno == 28 else "internal"
        reply = Refused(code=code, message=f"{type(request.body).__name__}: {error}")
    except Exception as error:  # noqa: BLE001 - a fault of ours must reach control as an answer, not as silence
        sys.excepthook(type(error), error, error.__traceback__)
        reply = Refused(code="internal", message=f"{type(request.body).__name__}: {error!r}")
    send_reply(writer, request.id, reply)
    try:
        await writer.drain()
    except OSError:
        pass  # control is gone; it asks again when it is back


def send_reply(writer: asyncio.StreamWriter, number: int, body: ReplyBody | Beat) -> None:
    if not writer.is_closing():
        writer.write(encode_frame(Reply(number, body)))


def error_of(refused: Refused) -> RacimoError:
    """What the other side refused with, as an error here."""
    code = refused.code if refused.code in ERROR_KINDS else "internal"
    return RacimoError(code, refused.message, refused.hint)
