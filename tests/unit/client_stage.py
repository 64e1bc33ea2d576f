"""A cluster in this process for tests of the client: answers by a function, and control processes that die."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import msgspec

from racimo.client.api import Client
from racimo.client.discovery import Endpoint, Finder
from racimo.control.views import RunView
from racimo.spec.home import Home
from racimo.spec.run import RunSpec

Answer = Callable[[httpx.Request], httpx.Response]
CUT = object()
"""In a list of stream parts: here the connection breaks."""


def run_view(**fields: Any) -> RunView:
    base = RunView(
        id="echo-1", kind="command", status="running", spec=RunSpec(command=("echo",)), submitted_wall_s=1_700_000_000.0
    )
    return msgspec.structs.replace(base, **fields)


class StageFinder(Finder):
    """A cluster that is always found; its supervisor lives, or not."""

    def __init__(self, tmp_path: Any, *, supervised: bool = True) -> None:
        super().__init__(lambda text: None, home=Home(tmp_path / "home"), may_start=False)
        self.supervised = supervised

    def find(self) -> Endpoint | None:
        return Endpoint(address="http://127.0.0.1:1", token="t0ken", token_source="token", home=self.home)

    def may_come_back(self, *, patient: bool = False) -> bool:
        return self.supervised


class Turns:
    """One answer after the other; the last one stays."""

    def __init__(self, *answers: Any) -> None:
        self._answers = list(answers)

    def next(self) -> Any:
        return self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]


class Stage:
    """`answers` maps `METHOD /path` to a JSON-able value, an exception, a function or `Turns` of these."""

    def __init__(self, tmp_path: Any, answers: dict[str, Any], *, supervised: bool = True) -> None:
        self.answers = answers
        self.requests: list[httpx.Request] = []
        self.said: list[str] = []
        finder = StageFinder(tmp_path, supervised=supervised)
        self.client = Client(say=self.said.append, transport=httpx.MockTransport(self.answer), finder=finder)

    def answer(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        found = self.answers[f"{request.method} {request.url.path}"]
        if isinstance(found, Turns):
            found = found.next()
        if isinstance(found, Exception):
            raise found
        if callable(found):
            found = found(request)
        if isinstance(found, httpx.Response):
            return found
        return httpx.Response(200, content=msgspec.json.encode(found))

    def bodies(self, method: str, path: str) -> list[Any]:
        return [json.loads(r.content) for r in self.requests if (r.method, r.url.path) == (method, path)]


class PartStream(httpx.SyncByteStream):
    def __init__(self, parts: list[Any]) -> None:
        self.parts = parts

    def __iter__(self) -> Iterator[bytes]:
        for part in self.parts:
            if part is CUT:
                raise httpx.RemoteProtocolError("peer closed connection without sending complete message body")
            yield part if isinstance(part, bytes) else msgspec.json.encode(part) + b"\n"


def stream(*parts: Any) -> Callable[[httpx.Request], httpx.Response]:
    return lambda request: httpx.Response(200, stream=PartStream(list(parts)))
