"""Single requests to a cluster, without the patience of `racimo.client.session`: answered now, or an error now."""

import ssl
from typing import Any, TypeVar

import msgspec

from racimo.client.discovery import Endpoint
from racimo.client.light_httpx import httpx
from racimo.control.views import ClusterView, NodeView
from racimo.spec.errors import RacimoError
from racimo.state.nouns import Node
from racimo.version import PROTOCOL_VERSION

PROBE_TIMEOUT_S = 2.0
ASK_TIMEOUT_S = 10.0

T = TypeVar("T")


def transport_for(endpoint: Endpoint) -> httpx.HTTPTransport:
    """For an https address the pinned certificate is trusted and nothing else; without one, what the system trusts."""
    verify: ssl.SSLContext | bool = False  # for http, loading certificates would only cost 30 ms
    if endpoint.address.startswith("https:"):
        from racimo.act import tls

        verify = tls.client_context(endpoint.certificate, (tls.HTTP_ALPN,)) if endpoint.certificate else True
    return httpx.HTTPTransport(verify=verify)


def headers_for(endpoint: Endpoint) -> dict[str, str]:
    return {"Authorization": f"Bearer {endpoint.token}", "Racimo-Protocol": str(PROTOCOL_VERSION)}


def ask(
    endpoint: Endpoint, method: str, path: str, kind: type[T], body: Any = None, *, timeout_s: float = ASK_TIMEOUT_S
) -> T:
    """One request. `RacimoError`: what the cluster answers, or `unreachable`; `httpx.TransportError` never."""
    from racimo.client.session import raise_for_error

    content = None if body is None else msgspec.json.encode(body)
    try:
        with httpx.Client(trust_env=False, transport=transport_for(endpoint)) as client:
            url = f"{endpoint.address}{path}"
            answer = client.request(method, url, content=content, headers=headers_for(endpoint), timeout=timeout_s)
    except httpx.ConnectError as error:
        raise_for_certificate(endpoint, error)
        raise NobodyThere(f"no cluster answers at {endpoint.address}: {error}") from error
    except httpx.TransportError as error:
        what = str(error) or type(error).__name__
        raise RacimoError("unreachable", f"{endpoint.address} does not answer {method} {path}: {what}") from error
    raise_for_error(answer.status_code, answer.content, endpoint)
    if kind is type(None):
        return None
    try:
        return msgspec.json.decode(answer.content, type=kind)
    except msgspec.MsgspecError as error:
        raise RacimoError("version-mismatch", f"{endpoint.address} answers as another version would: {error}") from None


def raise_for_certificate(endpoint: Endpoint, error: Exception) -> None:
    """`RacimoError` certificate-mismatch if that is why the connection failed: trying again would not help."""
    if "CERTIFICATE_VERIFY_FAILED" not in str(error):
        return
    if not endpoint.certificate:
        raise RacimoError(
            "certificate-mismatch",
            f"{endpoint.address} shows a certificate that nobody vouches for, and the token in {endpoint.token_source}"
            " has no pin to know it by",
            "racimo up   # on the head shows a line with SECRET:PIN: the token file should hold that",
        ) from error
    raise RacimoError(
        "certificate-mismatch",
        f"{endpoint.address} shows another certificate than the one that was pinned: another cluster is there now",
        "racimo up   # on the head shows the line to paste",
    ) from error


class NobodyThere(RacimoError):
    """No connection at all: the request has certainly not been taken."""

    def __init__(self, message: str) -> None:
        super().__init__("unreachable", message)


def probe(endpoint: Endpoint | None) -> ClusterView | None:
    """The cluster's own words about itself, or None while nobody answers. Other errors (a wrong token) are raised."""
    return None if endpoint is None else _if_answered(endpoint, "/v1/cluster", ClusterView)


def nodes_of(endpoint: Endpoint) -> list[Node]:
    """The nodes as the control process knows them; none while nobody answers."""
    return [view.node for view in _if_answered(endpoint, "/v1/nodes", list[NodeView]) or []]


def _if_answered(endpoint: Endpoint, path: str, kind: type[T]) -> T | None:
    try:
        return ask(endpoint, "GET", path, kind, timeout_s=PROBE_TIMEOUT_S)
    except RacimoError as error:
        if error.code == "unreachable":
            return None
        raise
