"""What the API does about nodes: draining, forgetting, and a backup taken while the cluster works."""

import asyncio
import io
import tarfile
from pathlib import Path

import msgspec
from control_stage import stage

from racimo.act.journal import SqliteJournal
from racimo.control.backup import ABOUT, About
from racimo.spec.home import Home


def test_a_drained_node_gets_no_new_work_until_that_is_taken_back(tmp_path: Path) -> None:
    async def check() -> None:
        async with stage(tmp_path) as cluster:
            answer = await cluster.http.post("/v1/nodes/n1/drain", json={"deadline_s": 60.0})
            assert answer.status_code == 200, answer.text
            (view,) = (await cluster.http.get("/v1/nodes")).json()
            assert view["node"]["draining"] is True and 50 < view["drain_left_s"] <= 60
            run = await cluster.submit("sleep", "1")
            assert run["status"] == "queued"
            assert (await cluster.http.post("/v1/nodes/n1/drain", json={"undo": True})).status_code == 200
            await cluster.until_started(run["id"])

    asyncio.run(check())


def test_what_cannot_be_asked_of_a_node_is_said(tmp_path: Path) -> None:
    async def check() -> None:
        async with stage(tmp_path) as cluster:
            for path, body, code in (
                ("/v1/nodes/nobody/drain", {}, "node-unknown"),
                ("/v1/nodes/nobody/forget", {}, "node-unknown"),
                ("/v1/nodes/n1/drain", {"deadline_s": -1.0}, "invalid-request"),
                ("/v1/nodes/n1/drain", {"undo": True}, "wrong-state"),
                ("/v1/nodes/n1/forget", {"confirm_dead": True}, "wrong-state"),
            ):
                answer = await cluster.http.post(path, json=body)
                assert answer.json()["code"] == code, answer.text
                assert answer.status_code >= 400

    asyncio.run(check())


def test_a_backup_has_the_journal_as_it_is_now(tmp_path: Path) -> None:
    async def check() -> None:
        home = Home(tmp_path / "home")
        home.journal_file.parent.mkdir(parents=True)
        home.token_file.write_text("t")
        async with stage(home.root, SqliteJournal(home.journal_file)) as cluster:
            run = await cluster.submit("sleep", "1")
            await cluster.until_started(run["id"])
            answer = await cluster.http.post("/v1/backup")
            assert answer.status_code == 200
            with tarfile.open(fileobj=io.BytesIO(answer.content)) as tar:
                about = tar.extractfile(ABOUT)
                assert about is not None and msgspec.json.decode(about.read(), type=About).cluster == "cluster"
                assert {"token", "control/journal.db"} <= set(tar.getnames())
                copy = tmp_path / "copy.db"
                journal = tar.extractfile("control/journal.db")
                assert journal is not None
                copy.write_bytes(journal.read())
            opened = SqliteJournal(copy)
        assert not opened.notes
        assert any(getattr(record.event, "run", "") == run["id"] for record in opened.records())
        opened.close()
        assert not [path for path in home.journal_file.parent.iterdir() if path.name.startswith(".backup")]

    asyncio.run(check())
