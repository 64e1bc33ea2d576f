"""What the API says of runs whose workers are on several machines, some of which go and come back."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest

from racimo.act.journal import MemoryJournal
from racimo.agent.logs import is_notice
from racimo.agent.protocol import LogChunk, LogPiece, Progress, ProgressBatch, ReadLog, Report, Wait
from racimo.control.hung import name_waiting
from racimo.control.mirror import LogCopies
from racimo.control.progress import ProgressBoard
from racimo.control.views import ClusterView, NodeView, OutputsView, ReportsView, RunView
from racimo.spec.run import RunSpec
from racimo.state.events import AttemptPlanned
from racimo.state.nouns import Failure, Generation, Reason, Run, Worker, parse_worker_id
from tests.unit.carrier_stage import LinkedAgent
from tests.unit.nodes_stage import Nodes, nodes_stage


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("racimo.control.log_source.BLINK_S", 0.02)
    monkeypatch.setattr("racimo.control.mirror.MIN_INTERVAL_S", 0.01)


def on(root: Path, check: Callable[[Nodes], Awaitable[None]], **settings: object) -> None:
    async def run() -> None:
        async with nodes_stage(root, **settings) as nodes:  # type: ignore[arg-type]
            await check(nodes)

    asyncio.run(run())


def journal_node(journal: MemoryJournal, worker: str) -> str:
    """Where it was placed."""
    run, attempt, index = parse_worker_id(worker)
    for record in journal.records(run):
        if isinstance(record.event, AttemptPlanned) and record.event.attempt == attempt:
            return next(place.node for place in record.event.placements if place.index == index)
    raise AssertionError(worker)


def test_each_workers_log_comes_from_its_node(tmp_path: Path) -> None:
    async def check(nodes: Nodes) -> None:
        run = await nodes.submit()
        for index in range(3):
            worker = f"{run}/1/{index}"
            nodes.agent_of(worker).print(worker, b"from %d\n" % index)
        assert sorted(await nodes.texts(run)) == ["from 0", "from 1", "from 2"]
        assert await nodes.texts(run, worker="1") == ["from 1"]
        first, *_ = await nodes.lines(run, worker="0")
        assert first == {"worker": f"{run}/1/0", "stream": "out", "text": "from 0", "offset": 7}

    on(tmp_path, check)


def test_the_last_words_of_a_lost_machine_are_read_from_the_heads_copy_which_is_said(tmp_path: Path) -> None:
    """kuberay#1047, ray#44561: logs are gone with the machine, or with the head."""

    async def check(nodes: Nodes) -> None:
        run = await nodes.submit()
        lost, other = nodes.worker_on(run, "n3"), nodes.worker_on(run, "n2")
        nodes.n2.print(other, b"here\n")
        nodes.n3.print(lost, b"working\n")
        nodes.n3.print(lost, b"oh no\n", "err")
        await nodes.until_copied(lost, b"working\n")
        await nodes.until_copied(lost, b"oh no\n", "err")
        await nodes.leave(nodes.n3)
        lines = await nodes.lines(run)
        notice = "[racimo: node n3 does not answer; the last MB that it sent]"
        assert sorted(line["text"] for line in lines) == sorted(["here", "working", "oh no", notice])
        assert [line["stream"] for line in lines if line["text"] == notice] == ["err"]

    on(tmp_path, check)


def test_after_the_head_starts_again_logs_and_history_are_there(tmp_path: Path) -> None:
    """kuberay#1047, ray#44561."""
    journal = MemoryJournal()
    run = ""

    async def before(nodes: Nodes) -> None:
        nonlocal run
        run = await nodes.submit()
        nodes.n3.print(nodes.worker_on(run, "n3"), b"one\n")
        await nodes.until_copied(nodes.worker_on(run, "n3"), b"one\n")

    async def after(nodes: Nodes) -> None:
        await nodes.leave(nodes.n3)
        assert "one" in await nodes.texts(run)
        events = (await nodes.stage.http.get(f"/v1/runs/{run}/events")).text
        assert "RunSubmitted" in events and "AttemptPlanned" in events

    on(tmp_path, before, journal=journal)
    on(tmp_path, after, journal=journal)


def test_a_machine_without_a_copy_is_named_and_the_others_are_read(tmp_path: Path) -> None:
    async def check(nodes: Nodes) -> None:
        run = await nodes.submit()
        nodes.n2.print(nodes.worker_on(run, "n2"), b"here\n")
        await nodes.leave(nodes.n3)
        assert sorted(await nodes.texts(run)) == ["[racimo: node n3 does not answer, and it had sent nothing]", "here"]

    on(tmp_path, check)


def test_a_follower_stays_while_a_machine_is_away_and_misses_nothing(tmp_path: Path) -> None:
    async def check(nodes: Nodes) -> None:
        run = await nodes.submit()
        worker = nodes.worker_on(run, "n3")
        nodes.n3.print(worker, b"one\ntw")
        await nodes.until_copied(worker, b"one\ntw")
        await nodes.leave(nodes.n3)
        following = asyncio.create_task(nodes.texts(run, worker=worker, follow=1))
        await asyncio.sleep(0.1)
        nodes.n3.print(worker, b"o\nthree\n")
        await nodes.come_back(nodes.n3)
        for index in range(3):
            name = f"{run}/1/{index}"
            nodes.agent_of(name).exited(name)
        async with asyncio.timeout(5):
            texts = await following
        assert [text for text in texts if not text.startswith("[")] == ["one", "two", "three"]

    on(tmp_path, check)


def test_a_follower_of_a_lost_machine_is_let_go_when_the_run_ends(tmp_path: Path) -> None:
    async def check(nodes: Nodes) -> None:
        run = await nodes.submit()
        following = asyncio.create_task(nodes.texts(run, follow=1))
        await asyncio.sleep(0.05)
        await nodes.leave(nodes.n3)
        await nodes.stage.loop.change(lambda core: core.node_silent("n3"))
        forgotten = await nodes.stage.http.post("/v1/nodes/n3/forget", json={"confirm_dead": True})
        assert forgotten.status_code == 200, forgotten.text
        await nodes.stage.http.post(f"/v1/runs/{run}/stop")
        async with asyncio.timeout(10):
            assert "[racimo: node n3 does not answer, and it had sent nothing]" in await following

    on(tmp_path, check)


def test_a_reader_goes_on_at_its_offsets(tmp_path: Path) -> None:
    async def check(nodes: Nodes) -> None:
        run = await nodes.submit()
        for index in range(3):
            worker = f"{run}/1/{index}"
            nodes.agent_of(worker).print(worker, b"a\nb\n")
        assert await nodes.texts(run, **{"from": "1/0:2:0;1/1:4:0"}) == ["b", "a", "b"]
        assert sorted(await nodes.texts(run, tail=1, **{"from": "1/0:0:0"})) == ["a", "b", "b", "b"]
        wrong = await nodes.stage.http.get(f"/v1/runs/{run}/logs", params={"from": "x"})
        assert wrong.json()["code"] == "invalid-request"

    on(tmp_path, check)


def test_an_exec_runs_on_the_node_of_its_worker(tmp_path: Path) -> None:
    async def check(nodes: Nodes) -> None:
        run = await nodes.submit()
        worker = nodes.worker_on(run, "n3")
        nodes.n3.script["hostname",] = b"n3\n"
        answer = await nodes.stage.http.post(f"/v1/runs/{run}/exec", json={"command": ["hostname"], "worker": worker})
        assert '"text":"n3"' in answer.text and '"code":0' in answer.text
        assert nodes.n3.orders[-1].exec_of == worker and all(not order.exec_of for order in nodes.n2.orders)

    on(tmp_path, check)


def test_nodes_say_what_they_have_and_the_cluster_sums_what_is_up(tmp_path: Path) -> None:
    async def check(nodes: Nodes) -> None:
        nodes.n2.free_memory_bytes, nodes.n3.free_memory_bytes = 222, 333
        http = nodes.stage.http
        views = msgspec.json.decode((await http.get("/v1/nodes")).content, type=list[NodeView])
        assert {view.node.id: view.free_memory_bytes for view in views} == {"n1": 1, "n2": 222, "n3": 333}
        cluster = msgspec.json.decode((await http.get("/v1/cluster")).content, type=ClusterView)
        assert (cluster.num_nodes, cluster.num_nodes_up, cluster.num_devices, cluster.num_free) == (3, 3, 3, 3)
        await http.post("/v1/nodes/n2/drain", json={})
        await nodes.leave(nodes.n3)
        cluster = msgspec.json.decode((await http.get("/v1/cluster")).content, type=ClusterView)
        assert (cluster.num_nodes, cluster.num_nodes_up, cluster.num_devices, cluster.num_free) == (3, 2, 2, 0)
        views = msgspec.json.decode((await http.get("/v1/nodes")).content, type=list[NodeView])
        assert [view.warnings for view in views if view.node.id == "n3"] == [("its agent does not answer",)]

    on(tmp_path, check)


def test_each_device_second_costs_what_its_own_node_costs(tmp_path: Path) -> None:
    async def check(nodes: Nodes) -> None:
        run = await nodes.submit()
        for index in range(3):
            name = f"{run}/1/{index}"
            nodes.agent_of(name).exited(name)  # each held one device for a second
        await nodes.stage.until(run, "succeeded")
        view = msgspec.json.decode((await nodes.stage.http.get(f"/v1/runs/{run}")).content, type=RunView)
        assert view.cost == pytest.approx((2 * 3.6 + 36.0) / 3600)
        assert view.price_known

    on(tmp_path, check, prices=(3.6, 36.0))


def test_outputs_of_all_nodes_are_one_folder(tmp_path: Path) -> None:
    async def check(nodes: Nodes) -> None:
        run = await nodes.submit()
        first, last = ("n2", "n3") if nodes.agent_of(f"{run}/1/0") is nodes.n2 else ("n3", "n2")
        agents = {"n2": nodes.n2, "n3": nodes.n3}
        large = bytes(range(256)) * 10_000
        agents[first].outputs = {"both": b"of rank 0", "deep/a": b"a"}
        agents[last].outputs = {"both": b"of another", "large": large}
        here = nodes.stage.home.output_dir(run)
        here.mkdir(parents=True)
        (here / "head").write_text("h")
        url, http = f"/v1/runs/{run}/outputs", nodes.stage.http
        view = msgspec.json.decode((await http.get(url)).content, type=OutputsView)
        assert [(file.path, file.node) for file in view.files] == [
            ("both", first), ("deep/a", first), ("head", "n1"), ("large", last),
        ]  # fmt: skip
        assert (await http.get(f"{url}/both")).content == b"of rank 0"
        assert (await http.get(f"{url}/both", params={"node": last})).content == b"of another"
        assert (await http.get(f"{url}/large")).content == large
        assert (await http.get(f"{url}/head")).content == b"h"
        assert (await http.get(f"{url}/none")).json()["code"] == "output-missing"
        assert (await http.get(url, params={"node": "n9"})).json()["code"] == "node-unknown"

    on(tmp_path, check)


def test_outputs_on_a_machine_that_is_away_are_not_passed_over_in_silence(tmp_path: Path) -> None:
    async def check(nodes: Nodes) -> None:
        run = await nodes.submit()
        nodes.n2.outputs, nodes.n3.outputs = {"a": b"a"}, {"b": b"b"}
        await nodes.leave(nodes.n3)
        url, http = f"/v1/runs/{run}/outputs", nodes.stage.http
        view = msgspec.json.decode((await http.get(url)).content, type=OutputsView)
        assert [file.path for file in view.files] == ["a"] and view.away == ("n3",)
        missing = await http.get(f"{url}/b")
        assert missing.json()["code"] == "unreachable" and "n3 does not" in missing.json()["message"]

    on(tmp_path, check)


def test_reports_of_all_nodes_are_merged_the_first_wins_and_positions_hold(tmp_path: Path) -> None:
    journal = MemoryJournal()
    run = ""

    async def reports(nodes: Nodes, after: int) -> ReportsView:
        answer = await nodes.stage.http.get(f"/v1/runs/{run}/reports", params={"after": after})
        return msgspec.json.decode(answer.content, type=ReportsView)

    async def before(nodes: Nodes) -> None:
        nonlocal run
        run = await nodes.submit()
        nodes.n2.reports = [Report(step=1, values={"loss": 1.0}), Report(step=2, values={"loss": 0.5})]
        nodes.n3.reports = [Report(step=1, values={"loss": 9.0, "accuracy": 0.1})]
        first = await reports(nodes, 0)
        assert first.next == 3 and not first.away
        seen = {(one.step, name): value for one in first.reports for name, value in one.values.items()}
        assert set(seen) == {(1, "loss"), (2, "loss"), (1, "accuracy")}
        nodes.n3.reports.append(Report(step=3, values={"loss": 0.2}))
        assert (await reports(nodes, 3)).reports == (Report(step=3, values={"loss": 0.2}),)
        assert (await reports(nodes, 4)).reports == ()

    async def after(nodes: Nodes) -> None:
        """A new head, another order, and without one of the nodes: what was position 3 still is."""
        await nodes.leave(nodes.n3)
        again = await reports(nodes, 3)
        assert again.reports == (Report(step=3, values={"loss": 0.2}),) and again.away == ("n3",)

    on(tmp_path, before, journal=journal)
    on(tmp_path, after, journal=journal)


def test_what_was_reported_on_a_lost_machine_is_there_although_nobody_had_asked(tmp_path: Path) -> None:
    """kuberay#1047: history does not depend on who looked at it in time."""

    async def check(nodes: Nodes) -> None:
        run = await nodes.submit()
        nodes.n3.reports = [Report(step=1, values={"loss": 1.0})]
        nodes.n3.print(nodes.worker_on(run, "n3"), b"step 1\n")
        merged = nodes.stage.home.merged_reports_dir / f"{run}.jsonl"
        async with asyncio.timeout(5):
            while not merged.exists():
                await asyncio.sleep(0.01)
        await nodes.leave(nodes.n3)
        answer = await nodes.stage.http.get(f"/v1/runs/{run}/reports")
        view = msgspec.json.decode(answer.content, type=ReportsView)
        assert view.reports == (Report(step=1, values={"loss": 1.0}),) and view.away == ("n3",)

    on(tmp_path, check)


def test_an_end_that_came_while_the_head_was_replaced_is_what_it_was(tmp_path: Path) -> None:
    """ray#65608: the head is replaced, exit 0 is recorded as failed."""
    journal = MemoryJournal()
    run = ""

    async def before(nodes: Nodes) -> None:
        nonlocal run
        run = await nodes.submit()

    def ended(n3: LinkedAgent, n2: LinkedAgent) -> None:
        for agent, devices in ((n2, 2), (n3, 1)):
            names = [f"{run}/1/{index}" for index in range(3)]
            own = [name for name in names if journal_node(journal, name) == agent.node.id]
            assert len(own) == devices
            for name in own:
                agent.exited(name)

    async def after(nodes: Nodes) -> None:
        view = await nodes.stage.until(run, "succeeded", "failed", "lost")
        assert view["status"] == "succeeded" and view["attempt"] == 1

    on(tmp_path, before, journal=journal)
    on(tmp_path, after, journal=journal, prepare=ended)


def test_who_waits_for_a_hung_worker_is_named_with_it_on_whatever_node_that_is() -> None:
    """pytorch#118369: the agent of the stuck one names it and its line; the head knows who waits elsewhere."""
    workers = {index: Worker(index=index, attempt=1, node=f"n{index}", devices=(0,), rank=index) for index in range(5)}
    reason = Reason(code="x", text="x")
    generation = Generation(number=2, members=(1, 2, 3, 4), reason=reason)
    spec = RunSpec(train="train.py")
    run = Run(id="r", spec=spec, order=1, status="running", attempt=1, workers=workers, generation=generation)
    waits = [
        Wait(worker="r/1/1", waits_for=(2,), for_s=60.0), Wait(worker="r/1/4", waits_for=(2, 3), for_s=60.0),
        Wait(worker="r/1/3", waits_for=(4,), for_s=60.0), Wait(worker="other/1/1", waits_for=(2,), for_s=60.0),
    ]  # fmt: skip
    stands = "rank 1 (r/1/2) has been in phase 'compute' for 60s at train.py:7 in train"
    for told in (stands, f"{stands} while rank 0 waits for it"):
        failure = name_waiting(Failure(code="worker-hung", message=told, worker="r/1/2"), run, waits)
        assert failure.message == f"{stands} while ranks 0, 3 wait for it"
    alone = Failure(code="worker-hung", message=stands, worker="r/1/2")
    assert name_waiting(alone, run, waits[2:]) == alone


def test_a_strays_progress_does_not_hide_the_present_attempts(tmp_path: Path) -> None:
    class Carrier:
        connected_nodes = frozenset({"n2"})
        local_node = "n1"

    board = ProgressBoard(Carrier(), tmp_path)  # type: ignore[arg-type]
    board._keep(ProgressBatch(number=1, progress=(Progress(worker="r/2/0", step=9),)))
    board._keep(ProgressBatch(number=1, progress=(Progress(worker="r/1/0", step=50), Progress(worker="r/2/1", step=8))))
    assert sorted(one.worker for one in board.of_run("r")) == ["r/2/0", "r/2/1"]


def test_how_far_an_ended_run_came_is_learnt_from_its_nodes(tmp_path: Path) -> None:
    class Carrier:
        connected_nodes = frozenset({"n2"})
        local_node = "n1"

        async def request(self, node: str, body: ReadLog) -> LogChunk:
            assert (node, body.stream) == ("n2", "steps")
            content = {"r/1/0": b'{"step": 41}\n{"step": 42, "loss": 0.5}\n', "r/1/1": b'{"st'}[body.worker]
            return LogChunk(offset=0, content=content, ended=True)

    workers = {
        index: Worker(index=index, attempt=1, node=node, devices=(0,), rank=index, status="exited")
        for index, node in enumerate(("n2", "n2", "n9"))
    }
    run = Run(
        id="r", spec=RunSpec(train="t.py"), order=1, status="succeeded", attempt=1, workers=workers, nodes=("n2", "n9")
    )
    board = ProgressBoard(Carrier(), tmp_path)  # type: ignore[arg-type]
    asyncio.run(board.recall([run]))
    assert [(one.worker, one.step, one.loss) for one in board.of_run("r")] == [("r/1/0", 42, 0.5)]


def test_copies_hold_the_last_mb_at_its_own_offsets(tmp_path: Path) -> None:
    copies = LogCopies(tmp_path)
    for number in range(40):
        line = (b"%04d " % number + b"x" * 94 + b"\n") * 1000
        copies.write(LogPiece(worker="r/1/0", stream="out", offset=number * 100_000, content=line))
    path = tmp_path / "r/1/0/out.log"
    assert path.stat().st_size == 4_000_000 and path.stat().st_blocks * 512 < 1_600_000
    chunk = copies.read("r/1/0", "out", 0, 4 * 2**20)
    assert len(chunk.content) >= 2**20 and chunk.offset + len(chunk.content) == 4_000_000
    assert copies.read("r/1/0", "out", 3_900_000, 5).content == b"0039 "
    # After a gap what came before is dropped, and that is said in the first line of what follows.
    copies.write(LogPiece(worker="r/1/0", stream="out", offset=8_192_000, content=b"half a line\nwhole one\n" * 20))
    chunk = copies.read("r/1/0", "out", 0, 2**20)
    first, *rest = chunk.content.decode().splitlines()
    assert chunk.offset == 8_192_000 and is_notice(first) and rest[-1] == "whole one"
    assert not any("\0" in line for line in rest)


def test_copies_go_with_their_run_and_beyond_the_bound_the_oldest_go_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = LogCopies(tmp_path)
    for run in ("forgotten", "old", "new", "live"):
        copies.write(LogPiece(worker=f"{run}/1/0", stream="out", offset=0, content=b"x" * 8192))
    kept = {"old", "new", "live"}
    copies.forget_all_but(kept.__contains__, ["old", "new", "live"])
    assert {path.name for path in tmp_path.iterdir()} == kept
    monkeypatch.setattr("racimo.control.mirror.MAX_TOTAL_BYTES", 20_000)
    copies.forget_all_but(kept.__contains__, ["old", "new", "live"])
    assert {path.name for path in tmp_path.iterdir()} == {"new", "live"}
