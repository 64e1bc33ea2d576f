"""The API as one table: from it come what is served and what `/openapi.json` says."""

from collections.abc import Awaitable, Callable
from typing import Any, Literal

import msgspec
from starlette.routing import Match, Route

from racimo.control.api import Api
from racimo.control.exchange import Exchange
from racimo.control.gate import Receive, Scope, Send
from racimo.control.views import (
    CheckView,
    ClusterView,
    DownView,
    DrainRequest,
    EndedView,
    ExecExitView,
    ExecRequest,
    FitRequest,
    ForgetRequest,
    LogLine,
    NodeView,
    OkView,
    OutputsView,
    ReportsView,
    RunProgress,
    RunView,
    ScaleRequest,
    SecretRequest,
    SnapshotRequest,
    SnapshotView,
    StudyRequest,
    StudyView,
    SubmitRequest,
)
from racimo.spec.errors import RacimoError
from racimo.state.events import Record
from racimo.state.nouns import Reason

Handler = Callable[[Api, Exchange], Awaitable[None]]
Body = Literal["json", "lines", "bytes"]


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """One call: what comes in, what goes out, and the sentence in the description. `query` maps a name to what it
    means; `takes` and `gives` are types (`gives` of lines perhaps several), `bytes` or None."""

    method: Literal["GET", "POST", "PUT", "DELETE"]
    path: str
    handler: Handler
    takes: Any = None
    gives: Any = OkView
    body: Body = "json"
    query: dict[str, str] = {}
    summary: str
    open: bool = False


_FOLLOW = "1: go on until the run has ended and everything was sent"

CALLS: tuple[Call, ...] = (
    Call(method="GET", path="/healthz", handler=Api.healthz, open=True, summary="Whether requests are taken."),
    Call(method="GET", path="/v1/cluster", handler=Api.cluster, gives=ClusterView, summary="The cluster as a whole."),
    Call(method="GET", path="/v1/nodes", handler=Api.nodes, gives=list[NodeView], summary="Nodes and who holds what."),
    Call(
        method="POST", path="/v1/snapshots", handler=Api.put_snapshot, takes=SnapshotRequest, gives=SnapshotView,
        summary="Names the files of a run; the snapshot is complete once the missing contents were sent.",
    ),
    Call(
        method="POST", path="/v1/fit", handler=Api.fit, takes=FitRequest,
        summary="Whether a run could ever start here, to be asked before its files are sent; can-never-fit if not.",
    ),
    Call(
        method="PUT", path="/v1/blobs/{sha256}", handler=Api.put_blob, takes=bytes,
        summary="One content, verified against its name.",
    ),
    Call(
        method="POST", path="/v1/blobs", handler=Api.put_bundle, takes=bytes,
        summary="Many small contents at once: SHA-256 (32 bytes), size (4 bytes, big-endian) and content of each.",
    ),
    Call(
        method="POST", path="/v1/runs", handler=Api.submit, takes=SubmitRequest, gives=RunView,
        summary="Submits a run; the same `request` again gives the same run.",
    ),
    Call(
        method="GET", path="/v1/runs", handler=Api.runs, gives=list[RunView],
        query={"all": "1: without a limit", "limit": "at most so many (50)"}, summary="Runs, newest first.",
    ),
    Call(method="GET", path="/v1/runs/{id}", handler=Api.run, gives=RunView, summary="One run with its workers."),
    Call(
        method="GET", path="/v1/runs/{id}/wait", handler=Api.wait, gives=RunView,
        query={"timeout_s": "answer after so many seconds at the latest (30, at most 60)"},
        summary="The run once it has ended, or as it is at the time-out.",
    ),
    Call(method="POST", path="/v1/runs/{id}/stop", handler=Api.stop, gives=RunView, summary="Ends a run."),
    Call(method="POST", path="/v1/runs/{id}/pause", handler=Api.pause, gives=RunView, summary="Holds a run."),
    Call(method="POST", path="/v1/runs/{id}/resume", handler=Api.resume, gives=RunView, summary="Lets it go on."),
    Call(
        method="POST", path="/v1/runs/{id}/scale", handler=Api.scale, takes=ScaleRequest, gives=RunView,
        summary="Changes how many workers a run may have.",
    ),
    Call(
        method="GET", path="/v1/runs/{id}/logs", handler=Api.logs, gives=LogLine, body="lines",
        query={"follow": _FOLLOW, "worker": "only this one: its index or id",
               "tail": "begin with so many lines of each stream of each worker",
               "from": "go on at these offsets: ATTEMPT/INDEX:OUT:ERR;..."},
        summary="Output lines of all workers of all attempts, secrets taken out.",
    ),
    Call(
        method="GET", path="/v1/runs/{id}/events", handler=Api.events, gives=(Record, EndedView), body="lines",
        query={"follow": _FOLLOW}, summary="What the journal says about a run; the last line tells how it ended.",
    ),
    Call(
        method="GET", path="/v1/runs/{id}/progress", handler=Api.progress, gives=RunProgress, body="lines",
        query={"follow": _FOLLOW}, summary="Step, loss and speed, at most 4 times a second.",
    ),
    Call(
        method="GET", path="/v1/runs/{id}/reports", handler=Api.reports, gives=ReportsView,
        query={"after": "the `next` of the answer before"}, summary="What the workers reported.",
    ),
    Call(
        method="GET", path="/v1/runs/{id}/trials", handler=Api.trials, gives=StudyView,
        query={"after": "the `seq` of the answer before: only what changed since",
               "wait_s": "answer after so many seconds at the latest (0, at most 60)"},
        summary="The trials of a tune run.",
    ),
    Call(
        method="POST", path="/v1/runs/{id}/study", handler=Api.change_study, takes=StudyRequest, gives=StudyView,
        summary="Goes on with a tune run under other terms: more trials, another space, another limit.",
    ),
    Call(method="GET", path="/v1/runs/{id}/why", handler=Api.why, gives=Reason, summary="Why the run is where it is."),
    Call(
        method="GET", path="/v1/runs/{id}/outputs", handler=Api.outputs, gives=OutputsView,
        query={"node": "only what lies on this node"}, summary="Files that the run left behind, on all its nodes.",
    ),
    Call(
        method="GET", path="/v1/runs/{id}/outputs/{path:path}", handler=Api.output, gives=bytes, body="bytes",
        query={"node": "from this node"}, summary="One output.",
    ),
    Call(
        method="POST", path="/v1/runs/{id}/exec", handler=Api.exec, takes=ExecRequest, gives=(LogLine, ExecExitView),
        body="lines", summary="Runs a command beside a worker; its lines, and at last its exit.",
    ),
    Call(method="GET", path="/v1/secrets", handler=Api.secrets, gives=list[str], summary="Names of secrets."),
    Call(
        method="PUT", path="/v1/secrets/{name}", handler=Api.put_secret, takes=SecretRequest,
        summary="Keeps a secret; runs that name it get it as an environment variable.",
    ),
    Call(method="DELETE", path="/v1/secrets/{name}", handler=Api.remove_secret, summary="Forgets a secret."),
    Call(
        method="GET", path="/v1/check", handler=Api.check, gives=CheckView,
        summary="Looks at every node and at the ways between them; takes seconds. Each finding with its cure.",
    ),
    Call(
        method="POST", path="/v1/nodes/{id}/drain", handler=Api.drain_node, takes=DrainRequest,
        summary="A node gets no new work, and what runs there moves or ends; `undo` takes that back.",
    ),
    Call(
        method="POST", path="/v1/nodes/{id}/forget", handler=Api.forget_node, takes=ForgetRequest,
        summary="A node that does not answer is given up for good.",
    ),
    Call(
        method="POST", path="/v1/backup", handler=Api.backup, gives=bytes, body="bytes",
        summary="A tar of all that makes this cluster: journal, snapshots, secrets, token, certificate.",
    ),
    Call(
        method="POST", path="/v1/shutdown", handler=Api.shutdown, gives=DownView,
        summary="Ends the cluster: commands stop, exact training saves itself and goes on at the next `up`.",
    ),
)  # fmt: skip


class Dispatcher:
    """The ASGI application behind the gate: finds the call and lets the `Api` do it."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._routes = [(Route(call.path, endpoint=_Endpoint, methods=[call.method]), call) for call in CALLS]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope = dict(scope)
        if scope["method"] == "GET" and scope["path"] in ("/openapi.json", "/docs"):
            await _describe(Exchange(scope, receive, send, {}), scope["path"])
            return
        for route, call in self._routes:
            match, found = route.matches(scope)
            if match is Match.FULL and scope["method"] == call.method:
                await call.handler(self._api, Exchange(scope, receive, send, found["path_params"]))
                return
        raise RacimoError("not-found", f"the API has no {scope['method']} {scope['path'][:200]}", "see /docs")


class _Endpoint:
    """Routes here only match; a class keeps Starlette from wrapping it."""


async def _describe(exchange: Exchange, path: str) -> None:
    from racimo.control import openapi  # only for who asks

    if path == "/docs":
        await exchange.answer_bytes(openapi.page().encode(), b"text/html; charset=utf-8")
    else:
        await exchange.answer(openapi.describe(CALLS))
