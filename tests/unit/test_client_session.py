"""What the client sends, what it makes of answers, and what it does when nobody is there."""

from pathlib import Path

import httpx
import pytest
from client_stage import Stage, Turns, run_view

from racimo.client import session as session_module
from racimo.client.discovery import Endpoint, Finder, local_endpoint, remote_endpoint
from racimo.client.session import raise_for_error, split_lines
from racimo.control.views import OutputView, RunView
from racimo.spec.errors import RacimoError
from racimo.spec.home import Home
from racimo.spec.run import RunSpec
from racimo.version import PROTOCOL_VERSION


def test_every_request_carries_token_and_protocol(tmp_path: Path) -> None:
    stage = Stage(tmp_path, {"GET /v1/runs/echo-1": run_view()})
    assert stage.client.run("echo-1") == run_view()
    (request,) = stage.requests
    assert request.headers["authorization"] == "Bearer t0ken"
    assert request.headers["racimo-protocol"] == str(PROTOCOL_VERSION)


def test_an_error_of_the_api_is_raised_with_its_code_and_hint(tmp_path: Path) -> None:
    view = {"code": "can-never-fit", "message": "asked for 9, has 4", "hint": "racimo nodes"}
    stage = Stage(tmp_path, {"GET /v1/nodes": httpx.Response(422, json=view)})
    with pytest.raises(RacimoError) as caught:
        stage.client.nodes()
    assert (caught.value.code, caught.value.message, caught.value.hint) == (
        "can-never-fit",
        "asked for 9, has 4",
        "racimo nodes",
    )
    assert caught.value.kind.exit_code == 4


def test_a_code_of_a_newer_version_does_not_break_the_client(tmp_path: Path) -> None:
    stage = Stage(
        tmp_path, {"GET /v1/nodes": httpx.Response(400, json={"code": "brand-new", "message": "what it says"})}
    )
    with pytest.raises(RacimoError, match="what it says") as caught:
        stage.client.nodes()
    assert caught.value.code == "internal"


def test_a_wrong_token_names_where_the_token_came_from(tmp_path: Path) -> None:
    stage = Stage(
        tmp_path, {"GET /v1/nodes": httpx.Response(401, json={"code": "unauthorized", "message": "unauthorized"})}
    )
    with pytest.raises(RacimoError) as caught:
        stage.client.nodes()
    assert caught.value.code == "unauthorized" and "RACIMO_TOKEN_FILE" in caught.value.hint


def test_an_answer_of_another_shape_is_a_version_mismatch(tmp_path: Path) -> None:
    stage = Stage(tmp_path, {"GET /v1/nodes": httpx.Response(200, content=b'{"not": "a list"}')})
    with pytest.raises(RacimoError) as caught:
        stage.client.nodes()
    assert caught.value.code == "version-mismatch"


def test_a_control_process_that_is_being_restarted_is_waited_for(tmp_path: Path) -> None:
    refused = httpx.ConnectError("refused")
    stage = Stage(tmp_path, {"GET /v1/runs/echo-1": Turns(refused, refused, run_view())})
    assert stage.client.run("echo-1").id == "echo-1"
    assert len(stage.requests) == 3


def test_waiting_has_an_end_and_says_what_it_waits_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "SAY_AFTER_S", 0.0)
    monkeypatch.setattr(session_module, "RETRY_S", 0.1)
    stage = Stage(tmp_path, {"GET /v1/nodes": httpx.ConnectError("refused")})
    with pytest.raises(RacimoError) as caught:
        stage.client.nodes()
    assert caught.value.code == "unreachable" and caught.value.hint == "racimo up"
    assert stage.said and stage.said[0].startswith("waiting for the control process")


def test_a_kept_alive_connection_that_was_closed_is_opened_again(tmp_path: Path) -> None:
    closed = httpx.RemoteProtocolError("Server disconnected without sending a response.")
    stage = Stage(tmp_path, {"GET /v1/nodes": Turns(closed, [])})
    assert stage.client.nodes() == []


def test_where_nobody_starts_it_again_a_refused_connection_is_said_at_once(tmp_path: Path) -> None:
    stage = Stage(tmp_path, {"GET /v1/nodes": httpx.ConnectError("refused")}, supervised=False)
    with pytest.raises(RacimoError) as caught:
        stage.client.nodes()
    assert caught.value.code == "unreachable" and len(stage.requests) == 1


def test_a_cluster_that_has_answered_is_not_started_again_until_the_next_submit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A follower must not undo `racimo down`."""
    refused = httpx.ConnectError("refused")
    answers = {"GET /v1/runs/echo-1": Turns(run_view(), refused), "POST /v1/runs": Turns(refused, run_view())}
    stage = Stage(tmp_path, answers, supervised=False)
    starts: list[None] = []
    monkeypatch.setattr(stage.client._finder, "restart", lambda: starts.append(None) or stage.client._finder.find())
    stage.client.run("echo-1")
    with pytest.raises(RacimoError) as caught:
        stage.client.run("echo-1")
    assert caught.value.code == "unreachable" and not starts
    assert stage.client.submit(RunSpec(command=("echo",), files=""), tmp_path).id == "echo-1"
    assert starts == [None]


def test_shutdown_is_not_sent_twice(tmp_path: Path) -> None:
    stage = Stage(tmp_path, {"POST /v1/shutdown": httpx.ReadError("reset")})
    with pytest.raises(RacimoError, match="lost the connection"):
        stage.client.shutdown()
    assert len(stage.requests) == 1


def test_a_submit_that_lost_its_answer_is_the_same_run(tmp_path: Path) -> None:
    """The idempotency key makes the second try harmless."""
    stage = Stage(tmp_path, {"POST /v1/runs": Turns(httpx.ReadError("reset"), run_view())})
    stage.client.submit(RunSpec(command=("echo",), files=""), tmp_path)
    first, second = stage.bodies("POST", "/v1/runs")
    assert first == second and len(first["request"]) == 32


def test_only_missing_contents_are_sent(tmp_path: Path) -> None:
    root = tmp_path / "work"
    root.mkdir()
    (root / "a.py").write_text("a")
    (root / "b.py").write_text("bb")
    sha_b = "3b64db95cb55c763391c707108489ae18b4112d783300de38e033b4c98c3deaf"
    stage = Stage(
        tmp_path,
        {
            "POST /v1/snapshots": {"id": "snap", "missing": [sha_b]},
            f"PUT /v1/blobs/{sha_b}": {"ok": True},
            "POST /v1/fit": {"ok": True},
            "POST /v1/runs": run_view(),
        },
    )
    stage.client.submit(RunSpec(command=("echo",)), root)
    assert [r.content for r in stage.requests if r.method == "PUT"] == [b"bb"]
    assert stage.bodies("POST", "/v1/runs")[0]["spec"]["snapshot"] == "snap"
    assert stage.said == [f"sending 2 B of 3 B in 2 files from {root}"]


def test_what_can_never_fit_is_refused_before_its_files_are_sent(tmp_path: Path) -> None:
    root = tmp_path / "work"
    root.mkdir()
    (root / "b.py").write_text("bb")
    never = httpx.Response(422, content=b'{"code": "can-never-fit", "message": "asked for 64", "hint": "racimo nodes"}')
    sha_b = "3b64db95cb55c763391c707108489ae18b4112d783300de38e033b4c98c3deaf"
    stage = Stage(tmp_path, {"POST /v1/snapshots": {"id": "snap", "missing": [sha_b]}, "POST /v1/fit": never})
    with pytest.raises(RacimoError, match="asked for 64"):
        stage.client.submit(RunSpec(command=("echo",)), root)
    assert stage.requests[-1].url.path == "/v1/fit" and not stage.said


def test_a_script_left_out_by_racimoignore_is_named(tmp_path: Path) -> None:
    root = tmp_path / "work"
    root.mkdir()
    (root / "train.py").write_text("")
    (root / ".racimoignore").write_text("*.py\n")
    stage = Stage(tmp_path, {})
    with pytest.raises(RacimoError, match=r"train\.py is among the files that \.racimoignore leaves out"):
        stage.client.submit(RunSpec(train="train.py"), root)


def test_wait_goes_on_until_the_run_has_ended(tmp_path: Path) -> None:
    ended = run_view(status="succeeded")
    stage = Stage(tmp_path, {"GET /v1/runs/echo-1/wait": Turns(run_view(), run_view(), ended)})
    assert stage.client.wait("echo-1").status == "succeeded"
    assert len(stage.requests) == 3


def test_wait_with_a_time_out_returns_what_is(tmp_path: Path) -> None:
    stage = Stage(tmp_path, {"GET /v1/runs/echo-1/wait": run_view()})
    assert stage.client.wait("echo-1", timeout_s=25).status == "running"
    assert [float(r.url.params["timeout_s"]) for r in stage.requests] == [20.0, 5.0]


def test_names_in_paths_are_escaped(tmp_path: Path) -> None:
    stage = Stage(tmp_path, {})
    with pytest.raises(KeyError):
        stage.client.remove_secret("../runs?x")
    assert stage.requests[0].url.raw_path == b"/v1/secrets/..%2Fruns%3Fx"


def test_a_download_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    def broken(request: httpx.Request) -> httpx.Response:
        def parts():  # type: ignore[no-untyped-def]
            yield b"half"
            raise httpx.ReadError("reset")

        return httpx.Response(200, content=parts())

    stage = Stage(
        tmp_path, {"GET /v1/runs/r-1/outputs/m/w.bin": Turns(broken, lambda r: httpx.Response(200, content=b"whole"))}
    )
    with pytest.raises(RacimoError):
        stage.client.download("r-1", "m/w.bin", tmp_path / "w.bin")
    assert list(tmp_path.iterdir()) == []
    stage.client.download("r-1", "m/w.bin", tmp_path / "w.bin")
    assert (tmp_path / "w.bin").read_bytes() == b"whole"


def test_lists_are_decoded_into_views(tmp_path: Path) -> None:
    outputs = [OutputView(path="a", size_bytes=1, modified_wall_s=0.0)]
    answered = {"files": outputs, "away": ["n2"]}
    stage = Stage(tmp_path, {"GET /v1/runs/r-1/outputs": answered, "GET /v1/runs": [run_view()]})
    assert stage.client.outputs("r-1") == outputs
    assert stage.said[-1] == "outputs that lie only on n2 are not listed: no answer from there"
    assert stage.client.runs(all=True, limit=3) == [run_view()]
    assert dict(stage.requests[-1].url.params) == {"all": "1", "limit": "3"}
    assert isinstance(stage.client.runs()[0], RunView)


def test_lines_are_split_at_newlines_only() -> None:
    """A log line may hold U+2028 and U+0085, at which str.splitlines would cut."""
    chunks = [b'{"a', b'": 1}\n\n{"b": "x\xe2\x80\xa8y\xc2\x85z"}', b"\n", b"last"]
    assert list(split_lines(iter(chunks))) == [b'{"a": 1}', '{"b": "x\u2028y\u0085z"}'.encode(), b"last"]


# Finding the cluster


def home_with_cluster(tmp_path: Path) -> Home:
    home = Home(tmp_path / "home")
    home.root.mkdir()
    home.cluster_file.write_text('{"id": "c", "address": "http://127.0.0.1:7", "version": "1", "later": 1}')
    home.token_file.write_text("t0ken\n")
    return home


def test_the_cluster_of_a_home_is_found_by_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RACIMO_TOKEN_FILE", raising=False)
    endpoint = local_endpoint(home_with_cluster(tmp_path))
    assert endpoint is not None
    assert (endpoint.address, endpoint.token) == ("http://127.0.0.1:7", "t0ken")


def test_racimo_address_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = home_with_cluster(tmp_path)
    (tmp_path / "other").write_text("other-token")
    monkeypatch.setenv("RACIMO_HOME", str(home.root))
    monkeypatch.setenv("RACIMO_ADDRESS", "gpu-box:7400/")
    monkeypatch.setenv("RACIMO_TOKEN_FILE", str(tmp_path / "other"))
    endpoint = Finder(print).find()
    assert endpoint is not None
    assert (endpoint.address, endpoint.token, endpoint.home) == ("http://gpu-box:7400", "other-token", None)


@pytest.mark.parametrize("address", ["ftp://x", "http://", "://"])
def test_an_address_that_is_none_is_named(address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RACIMO_ADDRESS", address)
    with pytest.raises(RacimoError) as caught:
        remote_endpoint(address, home_with_cluster(tmp_path))
    assert caught.value.code == "invalid-request" and repr(address) in caught.value.message


def test_no_token_says_how_to_give_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RACIMO_TOKEN_FILE", raising=False)
    home = home_with_cluster(tmp_path)
    home.token_file.unlink()
    with pytest.raises(RacimoError) as caught:
        local_endpoint(home)
    assert caught.value.code == "unauthorized" and "RACIMO_TOKEN_FILE" in caught.value.hint


def test_no_cluster_and_not_allowed_to_start_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RACIMO_ADDRESS", raising=False)
    finder = Finder(print, home=Home(tmp_path / "none"), may_start=False)
    with pytest.raises(RacimoError) as caught:
        finder.find_or_start()
    assert caught.value.code == "unreachable" and caught.value.hint == "racimo up"


@pytest.mark.parametrize("run", ["", "a/b?c", "..", ".", "a b-1", "echo-1\n", "\udcff"])
def test_what_no_run_can_be_called_is_an_unknown_run_whatever_it_means_in_a_url(tmp_path: Path, run: str) -> None:
    stage = Stage(tmp_path, {})
    for call in (stage.client.run, stage.client.stop, stage.client.why, lambda run: list(stage.client.logs(run))):
        with pytest.raises(RacimoError) as caught:
            call(run)
        assert caught.value.code == "run-unknown"
    assert not stage.requests


def test_a_body_that_is_no_utf_8_is_refused_by_what_is_wrong_in_it(tmp_path: Path) -> None:
    stage = Stage(tmp_path, {})
    with pytest.raises(RacimoError) as caught:
        list(stage.client.exec("echo-1", ["ls", "\udcff"]))
    assert (caught.value.code, caught.value.kind.exit_code) == ("invalid-request", 2)
    assert r"'\udcff'" in caught.value.message
    with pytest.raises(RacimoError, match="invalid-request"):
        stage.client.set_secret("KEY", "a\udcff")


def test_a_cluster_with_too_many_connections_is_busy_not_broken() -> None:
    endpoint = Endpoint(address="https://10.0.0.1:7700", token="t", token_source="here")
    with pytest.raises(RacimoError) as caught:
        raise_for_error(503, b"Service Unavailable", endpoint)
    assert caught.value.code == "busy" and "as many connections as it takes" in caught.value.message
