"""What every request passes before a handler sees it: host, token, protocol; and what every error becomes."""

import hmac
import logging
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any
from urllib.parse import urlsplit

import msgspec

from racimo.control.views import ErrorView
from racimo.spec.errors import RacimoError
from racimo.version import PROTOCOL_VERSION, __version__

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

LOOPBACK_NAMES = frozenset({"127.0.0.1", "localhost", "::1"})
OPEN_PATHS = frozenset({"/healthz", "/openapi.json", "/docs"})
"""Without a token: they say nothing of this cluster."""
PROTOCOL_HEADER = "racimo-protocol"

log = logging.getLogger("racimo.control.gate")


class Gate:
    """An ASGI application around another."""

    def __init__(self, app: App, token: str, names: Iterable[str] = (), host: str = "") -> None:
        """`names`: by which the API may be asked besides those of loopback; `host`: a name that may have any domain
        behind it."""
        self._app = app
        self._token = token.encode()
        self._names = LOOPBACK_NAMES | {name.lower() for name in (*names, host) if name}
        self._host = host.lower()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return  # no websockets; the lifespan needs nothing
        started = known = False

        async def watched_send(message: Message) -> None:
            nonlocal started
            started = True
            if message["type"] == "http.response.start" and not known:
                # A stranger keeps no place among the connections, nor a body that nobody reads.
                message["headers"] = [*message.get("headers", ()), (b"connection", b"close")]
            await send(message)

        try:
            headers = _headers(scope)
            check_host(headers, self._names, self._host)
            known = has_token(headers, self._token)
            if scope["path"] not in OPEN_PATHS:
                check_caller(headers, self._token)
            await self._app(scope, receive, watched_send)
        except RacimoError as error:
            await self._fail(scope, watched_send, error, started)
        except Exception as problem:
            log.error("%s %s", scope["method"], scope["path"], exc_info=problem)
            internal = RacimoError("internal", "an error inside of Racimo; its log has the traceback", "racimo check")
            await self._fail(scope, watched_send, internal, started)

    async def _fail(self, scope: Scope, send: Send, error: RacimoError, started: bool) -> None:
        if started:
            # Too late for a status. Without its last chunk the client knows that the answer is not whole.
            log.warning("%s %s broke off: %s", scope["method"], scope["path"], error.message)
            return
        body = msgspec.json.encode(ErrorView(code=error.code, message=error.message, hint=error.hint))
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        if error.kind.http_status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        if error.kind.http_status == 413:
            headers.append((b"connection", b"close"))  # the rest of the body is not read
        await send({"type": "http.response.start", "status": error.kind.http_status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


def check_host(headers: dict[str, str], names: frozenset[str] = LOOPBACK_NAMES, host_name: str = "") -> None:
    """Against DNS rebinding: a page of another site, resolved to this machine, names itself in Host and Origin."""
    host = headers.get("host", "")
    try:
        name = urlsplit(f"//{host}").hostname
    except ValueError:
        name = None
    in_a_domain = bool(host_name) and name is not None and name.startswith(f"{host_name}.")
    if name not in names and not in_a_domain:
        known = ", ".join(sorted(names))
        raise RacimoError("invalid-request", f"this API answers to {known}, not to {host[:100]!r}")
    origin = headers.get("origin")
    if origin is not None and origin not in (f"http://{host}", f"https://{host}"):
        raise RacimoError("invalid-request", "requests from pages of another origin are refused")


def has_token(headers: dict[str, str], token: bytes) -> bool:
    scheme, _, given = headers.get("authorization", "").partition(" ")
    same = hmac.compare_digest(given.strip().encode(), token)
    return scheme.lower() == "bearer" and same and bool(token)


def check_caller(headers: dict[str, str], token: bytes) -> None:
    """`RacimoError`: unauthorized, which says nothing more, or version-mismatch with both versions."""
    if not has_token(headers, token):
        raise RacimoError("unauthorized", "unauthorized")
    spoken = headers.get(PROTOCOL_HEADER, "")
    if spoken != str(PROTOCOL_VERSION):
        raise RacimoError(
            "version-mismatch",
            f"this cluster runs Racimo {__version__} (protocol {PROTOCOL_VERSION}), the client speaks protocol"
            f" {spoken[:20] or '(none said)'}",
            f"racimo down && racimo up   # a cluster of the client's version; or: pip install racimo=={__version__}",
        )


def _headers(scope: Scope) -> dict[str, str]:
    """Names in lower case; a header that comes twice counts as its last."""
    return {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
