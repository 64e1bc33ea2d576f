"""Small parts of the control process: clock, secrets, redaction, line splitting, outputs, the description."""

import asyncio
import os
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from racimo.agent.logs import enforce_cap, read_log
from racimo.agent.outputs import list_outputs, open_output
from racimo.control.clock import ClusterClock
from racimo.control.log_lines import LineSplitter, parse_positions, start_of_tail
from racimo.control.log_source import Part, Place
from racimo.control.log_streams import LogReader, Told
from racimo.control.openapi import describe, page
from racimo.control.outputs import read_parts
from racimo.control.progress import Commit, last_commit
from racimo.control.redaction import Redactor
from racimo.control.routes import CALLS
from racimo.control.secrets import SecretStore
from racimo.control.views import LogLine
from racimo.spec.errors import RacimoError
from racimo.state.nouns import Failure


def test_cluster_time_goes_on_from_the_journal_when_the_wall_clock_was_set_back() -> None:
    wall, monotonic = [1000.0], [5.0]
    clock = ClusterClock(2000.0, lambda: wall[0], lambda: monotonic[0])
    assert clock.now_s() == 2000.0
    wall[0], monotonic[0] = 10.0, 7.5
    assert clock.now_s() == 2002.5
    assert clock.wall_s() == 10.0


def test_secrets_are_private_and_survive_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "control" / "secrets.json"
    SecretStore(path).put("A", "one")
    store = SecretStore(path)
    store.put("B", "two")
    store.put("A", "three")
    assert path.stat().st_mode & 0o777 == 0o600
    assert SecretStore(path).values(("A", "B", "C")) == {"A": "three", "B": "two"}
    store.remove("A")
    assert SecretStore(path).names() == ["B"]
    assert [entry.name for entry in path.parent.iterdir()] == ["secrets.json"]


@pytest.mark.parametrize(
    ("name", "value"), [("1A", "x"), ("a-b", "x"), ("", "x"), ("A", ""), ("A", "x\0y"), ("A", "x" * 70_000)]
)
def test_what_cannot_be_a_variable_is_refused(tmp_path: Path, name: str, value: str) -> None:
    with pytest.raises(RacimoError) as caught:
        SecretStore(tmp_path / "s").put(name, value)
    assert caught.value.code == "invalid-request" and "x" * 100 not in caught.value.message


def test_missing_secrets_are_all_named(tmp_path: Path) -> None:
    with pytest.raises(RacimoError) as caught:
        SecretStore(tmp_path / "s").require(("A", "B"))
    assert caught.value.code == "secret-missing" and "A, B" in caught.value.message


def test_the_longest_value_is_taken_out_first() -> None:
    redactor = Redactor(["key", "key-with-tail", "line one\n  line two\n}"])
    assert redactor.text("key-with-tail and key") == "*** and ***"
    assert redactor.text("  line two") == "  ***"
    assert redactor.text("{}") == "{}"
    assert redactor.failure(Failure(code="internal", message="a key", traceback="line one")) == Failure(
        code="internal", message="a ***", traceback="***"
    )


@given(st.text(), st.lists(st.text(), max_size=4))
def test_no_value_is_left_after_redaction(text: str, values: list[str]) -> None:
    redacted = Redactor(values).text(text)
    assert all(value not in redacted for value in values if value and not set(value) <= {"*"})


@given(st.binary(max_size=200), st.integers(1, 30))
def test_lines_do_not_depend_on_how_the_bytes_came(content: bytes, size: int) -> None:
    whole, parts = LineSplitter(), LineSplitter()
    once = whole.feed(content)
    several = [line for at in range(0, len(content), size) for line in parts.feed(content[at : at + size])]
    assert once == several and (whole.rest, whole.at) == (parts.rest, parts.at)
    assert b"\n".join([*(line for _, line in once), whole.rest]) == content
    for end, line in once:  # whoever goes on behind a line misses nothing and reads nothing twice
        assert content[:end].endswith(line + b"\n")
    assert content[whole.at :] == whole.rest


def test_a_line_without_end_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("racimo.control.log_lines.MAX_LINE_BYTES", 10)
    splitter = LineSplitter(100)
    assert splitter.feed(b"x" * 25) == [(110, b"x" * 10), (120, b"x" * 10)]
    assert splitter.feed(b"y\nz") == [(127, b"xxxxxy")]
    splitter.jump(500)
    assert splitter.feed(b"a\n") == [(502, b"a")]


def test_positions_come_as_a_client_says_them() -> None:
    assert parse_positions("1/0:12:0;2/31:5:70") == {(1, 0): (12, 0), (2, 31): (5, 70)}
    assert parse_positions("") == {}
    for wrong in ("1/0", "1/0:a:b", "1:1:1", "1/0:1:1:1", "x;y"):
        with pytest.raises(RacimoError) as caught:
            parse_positions(wrong)
        assert caught.value.code == "invalid-request"


@given(st.lists(st.text("ab", max_size=3), max_size=6), st.booleans(), st.integers(0, 8))
def test_the_tail_is_the_last_lines(lines: list[str], ends: bool, count: int) -> None:
    content = ("\n".join(lines) + ("\n" if ends and lines else "")).encode()
    start = start_of_tail(content, count)
    present = content.decode().splitlines()
    if start is not None:
        assert content[start:].decode().splitlines() == (present[-count:] if count else [])
    else:
        assert len(present) <= count


def test_what_was_dropped_from_a_log_is_told_on_stderr_and_not_in_the_output(tmp_path: Path) -> None:
    log = tmp_path / "out.log"
    log.write_bytes(b"data of the run\n" * 10_000)
    try:
        assert enforce_cap(log, 64 * 1024)
    except OSError as error:
        pytest.skip(f"this file system punches no holes: {error}")

    class OneLog:
        async def read(self, place: Place, stream: str, offset: int, limit: int, follow: bool) -> Part:
            begin, part = read_log(log, offset, limit)
            return Part(offset=begin, content=part, ended=not part)

    async def lines() -> list[LogLine]:
        queue: asyncio.Queue[list[LogLine] | None] = asyncio.Queue()
        place, told = Place.of("r/1/0", "n1"), Told(queue, Redactor([]))
        await LogReader(OneLog(), place, "out", told, lambda: True).run(follow=True)  # type: ignore[arg-type]
        return [line for lines in iter(lambda: None if queue.empty() else queue.get_nowait(), None) for line in lines]

    notice, *rest = asyncio.run(lines())
    assert notice.stream == "err" and notice.text.startswith("[racimo: the oldest ")
    assert rest and {(line.stream, line.text) for line in rest} == {("out", "data of the run")}


def test_an_output_whose_name_is_no_utf_8_is_listed_with_an_escape_and_read_by_it(tmp_path: Path) -> None:
    Path(os.fsdecode(bytes(tmp_path) + b"/bad\xff.txt")).write_bytes(b"odd")
    (tmp_path / r"bad\xfe.txt").write_bytes(b"a backslash of its own")
    (tmp_path / "good.txt").write_bytes(b"good")
    listed = [view.path for view in list_outputs(tmp_path)]
    assert listed == [r"bad\xfe.txt", r"bad\xff.txt", "good.txt"]
    msgspec.json.encode(list_outputs(tmp_path))
    for path, content in zip(listed, (b"a backslash of its own", b"odd", b"good"), strict=True):
        fd, _ = open_output(tmp_path, path)
        with open(fd, "rb") as file:
            assert file.read() == content
    with pytest.raises(RacimoError):
        open_output(tmp_path, r"\x2e\x2e/x")


def test_outputs_are_listed_and_read(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "model.pt").write_bytes(b"x" * 600_000)
    (tmp_path / "link").symlink_to("deep/model.pt")
    (tmp_path / "out").symlink_to("/etc/passwd")
    (tmp_path / "nowhere").symlink_to("gone")
    os.mkfifo(tmp_path / "pipe")
    assert [(view.path, view.size_bytes) for view in list_outputs(tmp_path)] == [
        ("deep/model.pt", 600_000), ("link", 600_000),
    ]  # fmt: skip

    async def read(path: str) -> bytes:
        fd, size_bytes = open_output(tmp_path, path)
        return b"".join([part async for part in read_parts(fd, size_bytes)])

    assert asyncio.run(read("deep/model.pt")) == asyncio.run(read("link")) == b"x" * 600_000


@pytest.mark.parametrize("path", [
    "out", "nowhere", "pipe", "../secret", "a/../../secret", "/etc/passwd", "", "deep", "x\0y", ".", "up/secret",
    "gone",
])  # fmt: skip
def test_nothing_outside_of_the_folder_is_read(tmp_path: Path, path: str) -> None:
    root = tmp_path / "outputs"
    (root / "deep").mkdir(parents=True)
    (tmp_path / "secret").write_text("s")
    (root / "out").symlink_to("/etc/passwd")
    (root / "up").symlink_to("..")
    (root / "nowhere").symlink_to("gone")
    os.mkfifo(root / "pipe")
    num_open = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(RacimoError) as caught:
        open_output(root, path)
    assert caught.value.code == "output-missing"
    assert len(list(Path("/proc/self/fd").iterdir())) == num_open


def test_every_call_is_described_and_every_reference_leads_somewhere() -> None:
    api = describe(CALLS)
    described = {(method.upper(), path) for path, methods in api["paths"].items() for method in methods}
    assert len(described) == len(CALLS)
    for call in CALLS:
        operation = api["paths"][call.path.replace(":path", "")][call.method.lower()]
        assert operation["summary"].endswith(".") and operation["responses"]["200"]["content"]
        assert ("requestBody" in operation) == (call.takes is not None)
    text = msgspec.json.encode(api).decode()
    schemas = api["components"]["schemas"]
    names = {part.partition('"')[0] for part in text.split("#/components/schemas/")[1:]}
    assert names <= set(schemas) and {"RunView", "RunSpec", "ErrorView", "LogLine"} <= set(schemas)
    assert len(
        {operation["operationId"] for methods in api["paths"].values() for operation in methods.values()}
    ) == len(CALLS)


def test_the_page_loads_nothing_from_elsewhere() -> None:
    assert "http://" not in page() and "https://" not in page() and "src=" not in page()


def test_how_far_a_run_came_is_read_from_its_commit_logs(tmp_path: Path) -> None:
    for worker, lines in {
        "1/0": "",
        "1/1": '{"step": 7}\n',
        "2/0": '{"step": 8}\n{"step": 9, "loss": 0.5}\n',
        "2/1": '{"st',
    }.items():
        (tmp_path / "run-1" / worker).mkdir(parents=True)
        (tmp_path / "run-1" / worker / "steps.jsonl").write_text(lines)
    assert last_commit(tmp_path / "run-1") == Commit(step=9, loss=0.5, worker="run-1/2/0")
    assert last_commit(tmp_path / "run-2") is None
