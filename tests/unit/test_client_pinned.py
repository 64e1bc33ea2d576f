"""A head elsewhere is trusted by its certificate alone; while it is away, who follows a run waits long."""

import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from client_stage import Stage, Turns, run_view, stream

from racimo.act import tls
from racimo.client import session
from racimo.client.discovery import Endpoint, Finder, local_endpoint, remote_endpoint
from racimo.client.probing import ask
from racimo.control.views import LogLine
from racimo.spec.config import ClusterFile, JoinConfig, Token
from racimo.spec.errors import RacimoError
from racimo.spec.home import Home


class Answers(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        content = json.dumps({"path": self.path, "token": self.headers["Authorization"]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *words: Any) -> None:
        pass


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, bytes]]:
    """`IP:PORT` of a server with a certificate of its own, and that certificate."""
    folder = tmp_path_factory.mktemp("head")
    pem = tls.ensure_certificate(folder / "c.pem", folder / "c.key", ("127.0.0.1",))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    server.socket = tls.server_context(folder / "c.pem", folder / "c.key").wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"127.0.0.1:{server.server_address[1]}", pem
    server.shutdown()
    thread.join()
    server.server_close()


def endpoint(address: str, certificate: bytes) -> Endpoint:
    return Endpoint(address=f"https://{address}", token="t", token_source="here", certificate=certificate)


def test_the_pinned_certificate_is_trusted_and_no_other(head: tuple[str, bytes]) -> None:
    address, certificate = head
    assert ask(endpoint(address, certificate), "GET", "/x", dict) == {"path": "/x", "token": "Bearer t"}
    other, _ = tls.make_certificate(("127.0.0.1",))
    with pytest.raises(RacimoError) as caught:
        ask(endpoint(address, other), "GET", "/x", dict)
    assert caught.value.code == "certificate-mismatch", caught.value


def test_an_address_and_a_token_with_a_pin_are_all_a_client_needs(
    head: tuple[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address, certificate = head
    (tmp_path / "token").write_text(str(Token("s3cret", tls.pin_of(certificate))))
    monkeypatch.setenv("RACIMO_TOKEN_FILE", str(tmp_path / "token"))
    monkeypatch.setenv("RACIMO_ADDRESS", f"https://{address}")
    found = remote_endpoint(f"https://{address}", Home(tmp_path / "none"))
    assert (found.token, found.certificate) == ("s3cret", certificate)
    finder = Finder(lambda text: None)
    assert finder.find() == found and finder.head == address
    (tmp_path / "token").write_text(str(Token("s3cret", "0" * 64)))
    with pytest.raises(RacimoError) as caught:
        remote_endpoint(f"https://{address}", Home(tmp_path / "none"))
    assert caught.value.code == "certificate-mismatch"


def test_a_home_that_joined_leads_to_its_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RACIMO_ADDRESS", raising=False)
    monkeypatch.delenv("RACIMO_TOKEN_FILE", raising=False)
    home = Home(tmp_path)
    home.token_file.write_text(str(Token("s3cret", "0" * 64)))
    home.cluster_file.write_bytes(msgspec.json.encode(ClusterFile("c-1", "https://10.0.0.1:7700", "0.1.0")))
    home.join_file.write_bytes(msgspec.json.encode(JoinConfig(address="10.0.0.1:7700", cluster="c-1")))
    with pytest.raises(RacimoError, match="cannot read"):
        local_endpoint(home)
    home.certificate_file.write_bytes(b"pem")
    found = local_endpoint(home)
    assert found is not None
    assert (found.address, found.token, found.certificate) == ("https://10.0.0.1:7700", "s3cret", b"pem")
    finder = Finder(lambda text: None, home=home)
    assert finder.head == "10.0.0.1:7700" and not finder.may_come_back()
    with pytest.raises(RacimoError) as caught:
        finder.restart()
    assert "has joined a cluster" in caught.value.message, "a node starts no cluster of its own"


@pytest.fixture
def far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    """A cluster whose head is another machine; time passes by itself."""
    now_s = [0.0]
    monkeypatch.setattr(session.time, "monotonic", lambda: now_s[0])
    monkeypatch.setattr(session.time, "sleep", lambda pause_s: now_s.__setitem__(0, now_s[0] + pause_s))
    monkeypatch.setattr(Finder, "head", property(lambda self: "10.0.0.1:7700"))
    return Stage(tmp_path, {})


def away(times: int, then: Any) -> Turns:
    return Turns(*[session.httpx.ConnectError("refused")] * times, then)


def test_who_follows_a_run_waits_long_for_the_head_and_is_told_for_whom(far: Stage) -> None:
    line = LogLine(worker="echo-1/1/0", stream="out", text="still here")
    far.answers = {
        "GET /v1/runs/echo-1/logs": away(600, stream(line)),
        "GET /v1/runs/echo-1": run_view(status="succeeded"),
    }
    assert [got.text for got in far.client.logs("echo-1", follow=True)] == ["still here"]
    (said,) = far.said
    assert said.startswith("waiting for the head at 10.0.0.1:7700 (since ") and said.endswith("(for at most 1h 00m)")


def test_who_only_looks_is_told_soon_that_the_head_is_away(far: Stage) -> None:
    far.answers = {"GET /v1/runs/echo-1": away(10_000, run_view())}
    with pytest.raises(RacimoError) as caught:
        far.client.run("echo-1")
    assert caught.value.code == "unreachable" and len(far.requests) < 60


def test_who_waits_for_a_run_to_end_waits_as_long_as_who_follows_it(far: Stage) -> None:
    far.answers = {"GET /v1/runs/echo-1/wait": away(600, run_view(status="succeeded"))}
    assert far.client.wait("echo-1").status == "succeeded"


def test_a_certificate_that_nobody_vouches_for_needs_a_token_with_a_pin(head: tuple[str, bytes]) -> None:
    address, _ = head
    with pytest.raises(RacimoError) as caught:
        ask(endpoint(address, b""), "GET", "/x", dict)
    assert caught.value.code == "certificate-mismatch" and "no pin to know it by" in caught.value.message


def test_an_address_without_a_scheme_is_https_where_the_token_has_a_pin(
    head: tuple[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address, certificate = head
    monkeypatch.setenv("RACIMO_TOKEN_FILE", str(tmp_path / "token"))
    (tmp_path / "token").write_text(str(Token("s3cret", tls.pin_of(certificate))))
    assert remote_endpoint(address, Home(tmp_path)).address == f"https://{address}"
    (tmp_path / "token").write_text("s3cret")
    assert remote_endpoint(address, Home(tmp_path)).address == f"http://{address}"


def test_an_address_that_is_a_host_alone_is_a_heads_with_its_default_port(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RACIMO_TOKEN_FILE", str(tmp_path / "token"))
    monkeypatch.setattr(tls, "fetch_certificate", lambda address, pin: address.encode())
    (tmp_path / "token").write_text(str(Token("s3cret", "0" * 64)))
    for given, known in {"10.0.0.1": "10.0.0.1:7700", "head/": "head:7700", "[::1]": "[::1]:7700"}.items():
        found = remote_endpoint(given, Home(tmp_path))
        assert (found.address, found.certificate) == (f"https://{known}", known.encode())
    (tmp_path / "token").write_text("s3cret")
    with pytest.raises(RacimoError, match="no certificate's pin") as caught:
        remote_endpoint("10.0.0.1", Home(tmp_path))
    assert "SECRET:PIN" in caught.value.hint
