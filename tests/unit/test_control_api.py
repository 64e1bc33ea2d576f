"""The API over the real core and loop, with an agent that only pretends."""

import asyncio
import hashlib
from pathlib import Path
from typing import Any

import msgspec
import pytest
from control_stage import HEADERS, stage

from racimo.agent.protocol import Refused
from racimo.control.views import ClusterView, RunView
from racimo.spec.errors import ERROR_KINDS
from racimo.spec.run import RunSpec
from racimo.state.nouns import Failure
from racimo.version import PROTOCOL_VERSION


def lines(text: str) -> list[dict[str, Any]]:
    return [msgspec.json.decode(line) for line in text.splitlines() if line]


def test_without_the_token_nothing_is_said(tmp_path: Path) -> None:
    async def check() -> None:
        async with stage(tmp_path) as made:
            bodies = set()
            for wrong in (
                {},
                {"Authorization": "Bearer wrong"},
                {"Authorization": "Basic YTpi"},
                {"Authorization": "Bearer "},
            ):
                for path in ("/v1/cluster", "/v1/runs/none", "/no/such/path"):
                    made.http.headers = {**wrong}  # type: ignore[assignment]
                    answer = await made.http.get(path)
                    assert answer.status_code == 401
                    bodies.add(answer.text)
            assert bodies == {'{"code":"unauthorized","message":"unauthorized"}'}
            assert (await made.http.get("/healthz")).json() == {"ok": True}

    asyncio.run(check())


def test_another_protocol_is_refused_with_both_versions(tmp_path: Path) -> None:
    async def check() -> None:
        async with stage(tmp_path) as made:
            made.http.headers["Racimo-Protocol"] = "99"
            answer = await made.http.get("/v1/cluster")
            assert answer.status_code == 426
            assert answer.json()["code"] == "version-mismatch"
            assert "99" in answer.json()["message"] and f"protocol {PROTOCOL_VERSION}" in answer.json()["message"]

    asyncio.run(check())


@pytest.mark.parametrize("headers", [
    {"Host": "evil.example"}, {"Host": "127.0.0.1.evil.example:80"}, {"Host": ""},
    {"Origin": "http://evil.example"}, {"Origin": "null"}, {"Host": "localhost:9", "Origin": "http://127.0.0.1:9"},
])  # fmt: skip
def test_pages_of_other_sites_are_refused_even_with_the_token(tmp_path: Path, headers: dict[str, str]) -> None:
    async def check() -> None:
        async with stage(tmp_path) as made:
            answer = await made.http.get("/v1/cluster", headers=headers)
            assert answer.status_code == 400
            assert answer.json()["code"] == "invalid-request"

    asyncio.run(check())


@pytest.mark.parametrize("host", ["localhost:8000", "127.0.0.1", "[::1]:7"])
def test_loopback_names_and_the_same_origin_pass(tmp_path: Path, host: str) -> None:
    async def check() -> None:
        async with stage(tmp_path) as made:
            answer = await made.http.get("/v1/cluster", headers={"Host": host, "Origin": f"http://{host}"})
            assert answer.status_code == 200
            view = msgspec.json.decode(answer.content, type=ClusterView)
            assert view.num_devices == 2 and view.num_free == 2 and view.protocol == PROTOCOL_VERSION

    asyncio.run(check())


@pytest.mark.parametrize(("body", "code"), [
    (b"", "invalid-request"), (b"not json", "invalid-request"), (b"[]", "invalid-request"),
    (b'{"spec": {}}', "invalid-spec"),
    (b'{"spec": {"command": ["x"], "wrokers": 2}, "request": "r"}', "invalid-spec"),
    (b'{"spec": {"command": ["x"], "workers": "2..4"}, "request": "r"}', "invalid-spec"),
    (b'{"spec": {"command": ["x"]}}', "invalid-request"), (b"[" * 100_000, "invalid-request"),
    (b"\xff\xfe", "invalid-request"),
])  # fmt: skip
def test_a_wrong_body_is_named_and_leaves_nothing(tmp_path: Path, body: bytes, code: str) -> None:
    async def check() -> None:
        async with stage(tmp_path) as made:
            answer = await made.http.post("/v1/runs", content=body)
            assert answer.json()["code"] == code, answer.text
            assert answer.status_code == ERROR_KINDS[code].http_status
            assert (await made.http.get("/v1/runs")).json() == []

    asyncio.run(check())


def test_bodies_are_bounded_with_and_without_a_said_length(tmp_path: Path) -> None:
    async def check() -> None:
        async with stage(tmp_path) as made:

            async def parts() -> Any:
                for _ in range(50):
                    yield b" " * 100_000

            for content in (b" " * 5_000_000, parts()):
                answer = await made.http.post("/v1/runs", content=content)
                assert (answer.status_code, answer.json()["code"]) == (413, "upload-too-large")

    asyncio.run(check())


def test_the_same_request_submitted_twice_is_one_run(tmp_path: Path) -> None:
    async def check() -> None:
        async with stage(tmp_path) as made:
            first, second = await asyncio.gather(made.submit("a", request="key"), made.submit("a", request="key"))
            other = await made.submit("a", request="other")
            assert first["id"] == second["id"] != other["id"]
            assert len((await made.http.get("/v1/runs")).json()) == 2

    asyncio.run(check())


def test_a_run_goes_from_submission_to_its_last_line(tmp_path: Path) -> None:
    async def check() -> None:
        async with stage(tmp_path) as made:
            made.agent.script["hello",] = b"one\ntwo\nunfinished"
            run = (await made.submit("hello"))["id"]
            answer = await made.http.get(f"/v1/runs/{run}/logs", params={"follow": 1})
            assert [line["text"] for line in lines(answer.text)] == ["one", "two", "unfinished"]
            waited = await made.http.get(f"/v1/runs/{run}/wait", params={"timeout_s": 5})
            view = msgspec.json.decode(waited.content, type=RunView)
            assert view.status == "succeeded" and view.device_s == 1.0
            events = lines((await made.http.get(f"/v1/runs/{run}/events", params={"follow": 1})).text)
            assert [event["event"]["event"] for event in events[:-1]] == [
                "RunSubmitted", "AttemptPlanned", "WorkerStarted", "WorkerExited", "RunEnded",
            ]  # fmt: skip
            assert events[-1] == {"ended": "succeeded"}
            progress = lines((await made.http.get(f"/v1/runs/{run}/progress", params={"follow": 1})).text)
            assert progress[-1]["status"] == "succeeded"

    asyncio.run(check())


def test_wait_answers_at_its_time_out_and_at_the_end(tmp_path: Path) -> None:
    async def check() -> None:
        async with stage(tmp_path) as made:
            run = (await made.submit("sleep"))["id"]
            early = (await made.http.get(f"/v1/runs/{run}/wait", params={"timeout_s": 0.01})).json()
            assert early["status"] == "running"
            waiting = asyncio.create_task(made.http.get(f"/v1/runs/{run}/wait", params={"timeout_s": 10}))
            made.agent.exited(await made.until_started(run))
            assert (await waiting).json()["status"] == "succeeded"

    asyncio.run(check())


def test_following_ends_when_the_run_is_stopped(tmp_path: Path) -> None:
    async def check() -> None:
        async with stage(tmp_path) as made:
            run = (await made.submit("sleep"))["id"]
            following = asyncio.create_task(made.http.get(f"/v1/runs/{run}/logs", params={"follow": 1}))
            made.agent.print(await made.until_started(run), b"begun\n")
            assert (await made.http.post(f"/v1/runs/{run}/stop")).json()["status"] == "stopping"
            async with asyncio.timeout(5):
                assert [line["text"] for line in lines((await following).text)] == ["begun"]
            assert (await made.until(run, "stopped"))["status"] == "stopped"
            again = await made.http.post(f"/v1/runs/{run}/stop")
            assert (again.status_code, again.json()["code"]) == (409, "wrong-state")

    asyncio.run(check())


def test_following_goes_on_across_a_death_of_the_agent(tmp_path: Path) -> None:
    async def check() -> None:
        async with stage(tmp_path) as made:
            run = (await made.submit("sleep"))["id"]
            worker = await made.until_started(run)
            following = asyncio.create_task(made.http.get(f"/v1/runs/{run}/logs", params={"follow": 1}))
            made.agent.print(worker, b"before\nhal")
            await asyncio.sleep(0.05)
            await made.agent.die()
            made.agent.print(worker, b"f\nafter\n")
            await made.agent.listen()
            made.agent.exited(worker)
            async with asyncio.timeout(8):
                assert [line["text"] for line in lines((await following).text)] == ["before", "half", "after"]

    asyncio.run(check())


def test_a_queued_run_says_what_it_waits_for(tmp_path: Path) -> None:
    async def check() -> None:
        async with stage(tmp_path, num_slots=1) as made:
            first = (await made.submit("a"))["id"]
            second = await made.submit("b")
            assert second["status"] == "queued"
            why = (await made.http.get(f"/v1/runs/{second['id']}/why")).json()
            assert why["text"] == second["reason"]["text"] and why["code"]
            made.agent.exited(await made.until_started(first))
            await made.until(second["id"], "running")

    asyncio.run(check())


def test_more_than_there_is_is_refused_at_once_with_the_numbers(tmp_path: Path) -> None:
    """ray#34816: an impossible request hangs in silence."""

    async def check() -> None:
        async with stage(tmp_path) as made:
            spec = {"command": ["x"], "devices": "cpu:99", "workers": 1}
            answer = await made.http.post("/v1/runs", json={"spec": spec, "request": "r"})
            assert (answer.status_code, answer.json()["code"]) == (422, "can-never-fit")
            assert "99" in answer.json()["message"] and "2" in answer.json()["message"]

    asyncio.run(check())


def test_files_go_up_once_and_reach_the_agent(tmp_path: Path) -> None:
    async def check() -> None:
        async with stage(tmp_path) as made:
            content = b"print('x')\n"
            digest = hashlib.sha256(content).hexdigest()
            entry = {"path": "a/train.py", "mode": 0o644, "size_bytes": len(content), "sha256": digest}
            first = (await made.http.post("/v1/snapshots", json={"files": [entry]})).json()
            assert first["missing"] == [digest]
            incomplete = {"spec": {"train": "a/train.py", "snapshot": first["id"]}, "request": "r"}
            assert (await made.http.post("/v1/runs", json=incomplete)).json()["code"] == "invalid-request"
            assert (await made.http.put(f"/v1/blobs/{digest}", content=content + b"x")).status_code == 400
            assert (await made.http.put(f"/v1/blobs/{digest}", content=content)).json() == {"ok": True}
            again = (await made.http.post("/v1/snapshots", json={"files": [entry]})).json()
            assert again == {"id": first["id"]}
            missing_file = {"spec": {"train": "other.py", "snapshot": first["id"]}, "request": "r"}
            assert (await made.http.post("/v1/runs", json=missing_file)).json()["code"] == "file-missing"
            answer = await made.http.post("/v1/runs", json=incomplete)
            await made.until_started(answer.json()["id"])
            assert made.agent.blobs == {digest: content}
            assert [file.path for file in made.agent.orders[0].files] == ["a/train.py"]

    asyncio.run(check())


def test_secrets_reach_the_worker_and_nothing_else(tmp_path: Path) -> None:
    async def check() -> None:
        async with stage(tmp_path) as made:
            spec = {"command": ["x"], "secrets": ["TOKEN"]}
            missing = await made.http.post("/v1/runs", json={"spec": spec, "request": "r"})
            assert missing.json()["code"] == "secret-missing"
            assert (await made.http.put("/v1/secrets/TOKEN", json={"value": "hush-hush"})).status_code == 200
            assert (await made.http.get("/v1/secrets")).json() == ["TOKEN"]
            run = (await made.submit("x", secrets=("TOKEN",)))["id"]
            worker = await made.until_started(run)
            assert made.agent.orders[0].secrets == {"TOKEN": "hush-hush"}
            made.agent.print(worker, b"it is hush-hush, you know\n")
            failure = {"code": "worker-raised", "message": "bad hush-hush", "traceback": "...hush-hush..."}
            made.agent.exited(worker, 1, failure=Failure(**failure))
            view = await made.until(run, "failed")
            logs = await made.http.get(f"/v1/runs/{run}/logs")
            assert lines(logs.text)[0]["text"] == "it is ***, you know"
            events = await made.http.get(f"/v1/runs/{run}/events")
            assert "hush" not in events.text and "hush" not in msgspec.json.encode(view).decode()
            assert (await made.http.delete("/v1/secrets/TOKEN")).status_code == 200
            assert (await made.http.delete("/v1/secrets/TOKEN")).status_code == 404

    asyncio.run(check())


def test_a_refused_start_ends_the_run_with_the_agents_words(tmp_path: Path) -> None:
    async def check() -> None:
        async with stage(tmp_path) as made:
            made.agent.refuse_start = Refused(code="disk-full", message="3 MB left in /x", hint="rm something")
            view = await made.until((await made.submit("x"))["id"], "failed")
            assert view["failure"]["code"] == "disk-full" and view["failure"]["message"] == "3 MB left in /x"

    asyncio.run(check())


def test_exec_runs_beside_a_worker_and_gives_its_exit(tmp_path: Path) -> None:
    async def check() -> None:
        async with stage(tmp_path) as made:
            run = (await made.submit("sleep"))["id"]
            worker = await made.until_started(run)
            made.agent.script["pwd",] = b"/there\n"
            answer = await made.http.post(f"/v1/runs/{run}/exec", json={"command": ["pwd"]})
            first, last = lines(answer.text)
            assert first["text"] == "/there" and last["exit"]["outcome"] == "finished"
            assert made.agent.orders[-1].exec_of == worker
            records = lines((await made.http.get(f"/v1/runs/{run}/events")).text)
            assert len(records) == 3, "an exec is no event of the run"
            made.agent.exited(worker)
            await made.until(run, "succeeded")
            late = await made.http.post(f"/v1/runs/{run}/exec", json={"command": ["pwd"]})
            assert late.json()["code"] == "wrong-state"

    asyncio.run(check())


def test_tail_begins_with_the_last_lines(tmp_path: Path) -> None:
    async def check() -> None:
        async with stage(tmp_path) as made:
            made.agent.script["many",] = b"".join(b"line %d\n" % number for number in range(20_000))
            run = (await made.submit("many"))["id"]
            await made.until(run, "succeeded")
            answer = await made.http.get(f"/v1/runs/{run}/logs", params={"tail": 3})
            assert [line["text"] for line in lines(answer.text)] == ["line 19997", "line 19998", "line 19999"]
            whole = await made.http.get(f"/v1/runs/{run}/logs", params={"tail": 100_000})
            assert len(lines(whole.text)) == 20_000
            none = await made.http.get(f"/v1/runs/{run}/logs", params={"tail": 0})
            assert none.text == ""

    asyncio.run(check())


def test_streams_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def check() -> None:
        monkeypatch.setattr("racimo.control.exchange.MAX_STREAMS", 2)
        async with stage(tmp_path) as made:
            run = (await made.submit("sleep"))["id"]
            worker = await made.until_started(run)
            follow = [
                asyncio.create_task(made.http.get(f"/v1/runs/{run}/logs", params={"follow": 1})) for _ in range(2)
            ]
            await asyncio.sleep(0.05)
            third = await made.http.get(f"/v1/runs/{run}/events", params={"follow": 1})
            assert (third.status_code, third.json()["code"]) == (429, "busy")
            made.agent.exited(worker)
            await asyncio.gather(*follow)
            assert (await made.http.get(f"/v1/runs/{run}/events", params={"follow": 1})).status_code == 200

    asyncio.run(check())


def test_what_is_not_there_is_said_so(tmp_path: Path) -> None:
    async def check() -> None:
        async with stage(tmp_path) as made:
            for method, path, code in (
                ("GET", "/v1/runs/nope", "run-unknown"), ("POST", "/v1/runs/nope/stop", "run-unknown"),
                ("GET", "/v1/runs/nope/logs?follow=1", "run-unknown"), ("GET", "/v2/runs", "not-found"),
                ("PATCH", "/v1/runs", "not-found"), ("GET", "/v1/runs?limit=-1", "invalid-request"),
                ("GET", "/v1/runs?all=maybe", "invalid-request"), ("PUT", "/v1/blobs/short", "invalid-request"),
                ("PUT", "/v1/secrets/not-a-name", "invalid-request"),
            ):  # fmt: skip
                answer = await made.http.request(method, path, content=b'{"value": "x"}' if method == "PUT" else b"")
                assert answer.json()["code"] == code, (path, answer.text)
                assert answer.status_code == ERROR_KINDS[code].http_status

    asyncio.run(check())


def test_an_error_of_ours_shows_no_internals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def check() -> None:
        async with stage(tmp_path) as made:

            def broken(run: str) -> None:
                raise KeyError("internal detail")

            monkeypatch.setattr(made.core, "why", broken)
            await made.loop.change(lambda core: core.submit(RunSpec(command=("x",)), "r"))
            answer = await made.http.get("/v1/runs/x-1/why")
            assert (answer.status_code, answer.json()["code"]) == (500, "internal")
            assert "detail" not in answer.text

    asyncio.run(check())


def test_shutdown_is_answered_before_it_begins(tmp_path: Path) -> None:
    async def check() -> None:
        async with stage(tmp_path) as made:
            assert (await made.http.post("/v1/shutdown")).json() == {}
            assert made.shut_down.is_set()
            assert HEADERS["Authorization"] not in (await made.http.get("/v1/cluster")).text
            late = {"spec": {"command": ["true"], "files": ""}, "request": "late"}
            refused = await made.http.post("/v1/runs", json=late)
            assert (refused.status_code, refused.json()["code"]) == (409, "wrong-state")

    asyncio.run(check())
