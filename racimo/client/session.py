"""One kept-alive HTTP connection to a cluster: requests decoded into views, errors into `RacimoError`, waits bounded.

A control process that was killed is back within a second, started by its supervisor. So a request that finds nobody
there is tried again, for `RETRY_S`, as long as the supervisor lives; and it says on stderr what it waits for.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import msgspec

from racimo.client.discovery import Endpoint, Finder
from racimo.client.light_httpx import httpx
from racimo.client.probing import headers_for, raise_for_certificate, transport_for
from racimo.client.say import Say
from racimo.control.views import ErrorView
from racimo.spec.errors import ERROR_KINDS, RacimoError
from racimo.spec.quantity import format_duration

CONNECT_TIMEOUT_S = 3.0
CALL_TIMEOUT_S = 60.0
STREAM_SILENCE_S = 50.0
"""A stream sends an empty line every 15 s; one that is silent for longer is dead."""
RETRY_S = 30.0
HEAD_PATIENCE_S = 3600.0
"""How long a stream waits for a head on another machine to come back: the runs that it follows go on meanwhile."""
FIRST_DELAY_S = 0.02
MAX_DELAY_S = 1.0
SAY_AFTER_S = 1.0
ODD_TEXT_CHARS = 40
"""Shown of what stands before a character that cannot be sent."""
MAX_LINE_BYTES = 64 * 2**20

T = TypeVar("T")
Params = dict[str, str | int | float]
Disconnected = (httpx.TransportError,)


class Backoff:
    """Delays that double up to `MAX_DELAY_S` until `RETRY_S` have passed; says once what is waited for."""

    def __init__(self, say: Say, waits_for: str, *, limit_s: float | None = None) -> None:
        self.say = say
        self._waits_for = waits_for
        self._limit_s = RETRY_S if limit_s is None else limit_s
        self._began_s = time.monotonic()
        self._began_wall_s = time.time()
        self._delay_s = FIRST_DELAY_S
        self._said = False

    def wait_for_head(self, head: str, *, patient: bool) -> None:
        """The control process is on another machine, where nobody here knows who starts it again."""
        self._waits_for = f"the head at {head} (since {time.strftime('%H:%M:%S', time.localtime(self._began_wall_s))})"
        self._limit_s = max(self._limit_s, HEAD_PATIENCE_S) if patient else self._limit_s

    def wait(self) -> bool:
        """False once the time is over."""
        passed_s = time.monotonic() - self._began_s
        if passed_s >= self._limit_s:
            return False
        if passed_s >= SAY_AFTER_S and not self._said:
            self._said = True
            self.say(f"waiting for {self._waits_for} (for at most {format_duration(self._limit_s)})")
        # Nothing can be awaited here: a port that will be listened on makes no event for those outside.
        time.sleep(self._delay_s)
        self._delay_s = min(MAX_DELAY_S, self._delay_s * 2)
        return True


class Session:
    """`transport` is for tests. Not for several threads at once, except that streams may run beside calls."""

    def __init__(self, finder: Finder, say: Say, transport: httpx.BaseTransport | None = None) -> None:
        self._finder = finder
        self.say = say
        self._transport = transport
        self._http: httpx.Client | None = None
        self._endpoint: Endpoint | None = None
        self._met = False
        """A cluster has answered; if it ends now, somebody ended it, and none is started in its place."""

    def begin(self) -> None:
        """For something new, such as another run: a cluster that has ended meanwhile may be started again."""
        self._met = False

    @property
    def endpoint(self) -> Endpoint:
        """Where the cluster is; finds it, or starts one, at the first use."""
        if self._endpoint is None:
            self._endpoint = self._finder.find_or_start()
        return self._endpoint

    def close(self) -> None:
        if self._http is not None:
            self._http.close()
            self._http = None

    def call(
        self,
        method: str,
        path: str,
        kind: type[T],
        *,
        params: Params | None = None,
        body: Any = None,
        content: bytes | Callable[[], Iterator[bytes]] | None = None,
        content_bytes: int = 0,
        timeout_s: float = CALL_TIMEOUT_S,
        safe_to_repeat: bool = True,
        following: bool = False,
    ) -> T:
        """One request, its answer decoded as `kind`. `body` goes as JSON, `content` as it is, or as its parts, of which
        there are `content_bytes`; they are asked for anew with each try. `following`: somebody
        waits for what a run does, and waits on while the head is away."""
        if body is not None:
            content = _encode(body)
        headers = {"Content-Length": str(content_bytes)} if callable(content) else {}
        response = self._send(method, path, params, content, headers, timeout_s, safe_to_repeat, following)
        raise_for_error(response.status_code, response.content, self.endpoint)
        if kind is type(None):
            return None
        try:
            return msgspec.json.decode(response.content, type=kind)
        except msgspec.MsgspecError as error:
            raise RacimoError(
                "version-mismatch", f"the answer to {method} {path} is not what this version expects: {error}"
            ) from None

    def _send(
        self,
        method: str,
        path: str,
        params: Params | None,
        content: bytes | Callable[[], Iterator[bytes]] | None,
        headers: dict[str, str],
        timeout_s: float,
        repeat: bool,
        following: bool,
    ) -> httpx.Response:
        backoff = Backoff(self.say, "the control process, which its supervisor is starting again")
        while True:
            try:
                body = content() if callable(content) else content
                response = self._client().request(
                    method, path, params=params, content=body, headers=headers, timeout=_timeouts(timeout_s)
                )
                self._met = True
                return response
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                self.recover(backoff, error, patient=following, following=following)
            except Disconnected as error:
                if not repeat or isinstance(error, httpx.ReadTimeout):
                    raise self.unreachable(f"lost the connection during {method} {path}: {_words(error)}") from None
                self.recover(
                    backoff, error, patient=True, following=following
                )  # a kept-alive connection that was closed meanwhile

    @contextlib.contextmanager
    def open_stream(
        self, method: str, path: str, *, params: Params | None = None, body: Any = None
    ) -> Iterator[httpx.Response]:
        """A streamed answer, once; `Disconnected` passes through for the caller to handle."""
        content = None if body is None else _encode(body)
        client = self._client()
        with client.stream(method, path, params=params, content=content, timeout=_timeouts(STREAM_SILENCE_S)) as got:
            self._met = True
            if got.status_code >= 400:
                raise_for_error(got.status_code, got.read(), self.endpoint)
            yield got

    def recover(self, backoff: Backoff, error: Exception, *, patient: bool = False, following: bool = False) -> None:
        """After a failed try: finds the cluster anew, or starts one if none has answered this session, and waits a
        little; or raises `unreachable`. `patient`: also where
        nobody is known to start it again (a cluster elsewhere, whose stream was cut). `following`: as `call`."""
        self.close()
        raise_for_certificate(self.endpoint, error)
        if head := self._finder.head:
            backoff.wait_for_head(head, patient=following)
        if not self._finder.may_come_back(patient=patient):
            endpoint = None if self._met else self._finder.restart()
            if endpoint is None:
                raise self.unreachable(_words(error)) from None
            self._endpoint = endpoint
        if not backoff.wait():
            raise self.unreachable(_words(error)) from None
        self._endpoint = self._finder.find() or self._endpoint

    def unreachable(self, why: str) -> RacimoError:
        return RacimoError("unreachable", f"no cluster answers at {self.endpoint.address}: {why}", self._finder.cure())

    def _client(self) -> httpx.Client:
        if self._http is not None:
            return self._http
        endpoint = self.endpoint
        self._http = httpx.Client(
            base_url=endpoint.address,
            headers=headers_for(endpoint),
            transport=self._transport or transport_for(endpoint),
            trust_env=False,
        )
        return self._http


def _encode(body: Any) -> bytes:
    try:
        return msgspec.json.encode(body)
    except UnicodeEncodeError as error:
        near = error.object[max(0, error.start - ODD_TEXT_CHARS) : error.end]
        raise RacimoError("invalid-request", f"{near!a} is not UTF-8 text and cannot be sent") from None


def split_lines(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Lines of an NDJSON stream as they come, keep-alive (empty) ones left out. Splits at `\\n` and nothing else."""
    rest = b""
    for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        yield from (line for line in lines if line)
        if len(rest) > MAX_LINE_BYTES:
            raise RacimoError("internal", f"a line of the stream is longer than {MAX_LINE_BYTES} bytes")
    if rest:
        yield rest


def raise_for_error(status: int, content: bytes, endpoint: Endpoint) -> None:
    """Turns an error answer into the `RacimoError` that the cluster raised."""
    if status < 400:
        return
    try:
        view = msgspec.json.decode(content, type=ErrorView)
    except msgspec.MsgspecError:
        view = ErrorView(code="internal", message=f"the cluster answered with status {status}")
        if status == 503:  # the web server's own word, before any of the API is asked
            view = ErrorView(
                code="busy",
                message=f"the cluster at {endpoint.address} has as many connections as it takes",
                hint="racimo check   # in some seconds, or on the head itself: loopback has places of its own",
            )
    if status == 401:
        hint = f"the token comes from {endpoint.token_source}; $RACIMO_TOKEN_FILE names another file"
        hint += ", with SECRET:PIN for a head elsewhere" if endpoint.home is None else ""
        raise RacimoError("unauthorized", f"the cluster at {endpoint.address} does not accept this token", hint)
    raise RacimoError(view.code if view.code in ERROR_KINDS else "internal", view.message, view.hint)


def _timeouts(silence_s: float) -> httpx.Timeout:
    return httpx.Timeout(silence_s, connect=CONNECT_TIMEOUT_S)


def _words(error: Exception) -> str:
    return str(error) or type(error).__name__
