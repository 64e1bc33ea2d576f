"""Sending contents: several at a time, each once, and the first error ends it."""

import hashlib
import threading
from pathlib import Path

import httpx
import pytest
from client_stage import Stage

from racimo.client import upload
from racimo.control import bundle
from racimo.spec.errors import RacimoError


def folder(tmp_path: Path, count: int) -> dict[str, bytes]:
    root = tmp_path / "files"
    root.mkdir()
    contents = {f"f{number}": f"content {number}".encode() for number in range(count)}
    for name, content in contents.items():
        (root / name).write_bytes(content)
    return contents


def names(contents: dict[str, bytes]) -> list[str]:
    return sorted(hashlib.sha256(content).hexdigest() for content in contents.values())


def test_many_files_are_sent_several_at_a_time_and_each_once(tmp_path: Path) -> None:
    contents = folder(tmp_path, 40)
    together = threading.Barrier(upload.MAX_SENDERS, timeout=10)

    def put(request: httpx.Request) -> httpx.Response:
        if len(sent) < upload.MAX_SENDERS:
            sent.append(1)
            together.wait()  # passes only once all senders are there
        return httpx.Response(200, json={"ok": True})

    sent: list[int] = []
    answers = {f"PUT /v1/blobs/{name}": put for name in names(contents)}
    stage = Stage(tmp_path, {"POST /v1/snapshots": {"id": "snap", "missing": names(contents)}, **answers})
    assert stage.client.upload(tmp_path / "files") == "snap"
    puts = [request for request in stage.requests if request.method == "PUT"]
    assert sorted(request.url.path.rpartition("/")[2] for request in puts) == names(contents)
    assert sorted(request.content for request in puts) == sorted(contents.values())
    assert all(request.headers["content-length"] == str(len(request.content)) for request in puts)


def test_the_first_refusal_ends_the_upload(tmp_path: Path) -> None:
    contents = folder(tmp_path, upload.BUNDLES_FROM - 1)
    refusal = httpx.Response(507, json={"code": "disk-full", "message": "no room"})
    answers = {f"PUT /v1/blobs/{name}": lambda request: refusal for name in names(contents)}
    stage = Stage(tmp_path, {"POST /v1/snapshots": {"id": "snap", "missing": names(contents)}, **answers})
    with pytest.raises(RacimoError) as caught:
        stage.client.upload(tmp_path / "files")
    assert caught.value.code == "disk-full"
    assert sum(request.method == "PUT" for request in stage.requests) <= 2 * upload.MAX_SENDERS


def test_a_file_that_changes_meanwhile_is_named_and_not_tried_again(tmp_path: Path) -> None:
    contents = folder(tmp_path, 1)
    stage = Stage(tmp_path, {})

    def snapshot(request: httpx.Request) -> httpx.Response:
        (tmp_path / "files" / "f0").write_bytes(b"CONTENT 0")
        return httpx.Response(200, json={"id": "snap", "missing": names(contents)})

    stage.answers["POST /v1/snapshots"] = snapshot
    stage.answers[f"PUT /v1/blobs/{names(contents)[0]}"] = {"ok": True}
    with pytest.raises(RacimoError, match="changed while it was being sent"):
        stage.client.upload(tmp_path / "files")


def test_many_small_files_go_together_and_large_ones_by_themselves(tmp_path: Path) -> None:
    contents = folder(tmp_path, 3 * upload.BUNDLES_FROM)
    large = b"x" * (bundle.MAX_CONTENT_BYTES + 1)
    (tmp_path / "files" / "large").write_bytes(large)
    contents["large"] = large
    wanted = names(contents)
    answers = {f"PUT /v1/blobs/{name}": {"ok": True} for name in wanted}
    listed = {"id": "snap", "missing": wanted}
    stage = Stage(tmp_path, {"POST /v1/snapshots": listed, "POST /v1/blobs": {"ok": True}, **answers})
    assert stage.client.upload(tmp_path / "files") == "snap"
    alone = [request for request in stage.requests if request.method == "PUT"]
    together = [request for request in stage.requests if request.url.path == "/v1/blobs"]
    assert [len(request.content) for request in alone] == [len(large)]
    assert 1 < len(together) <= upload.MAX_SENDERS + 1
    sent = [found for request in together for found in bundle.contents(request.content)]
    assert sorted(content for _, content in sent) == sorted(c for name, c in contents.items() if name != "large")
    assert all(hashlib.sha256(content).hexdigest() == name for name, content in sent)
