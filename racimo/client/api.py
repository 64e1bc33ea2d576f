"""`Client`: everything the API of a cluster can do, as plain methods that return views and raise `RacimoError`."""

import os
import re
import secrets
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import msgspec

from racimo.client import streams
from racimo.client.discovery import Finder
from racimo.client.light_httpx import httpx
from racimo.client.say import Say, to_stderr
from racimo.client.session import Session
from racimo.control.views import (
    ClusterView,
    DownView,
    DrainRequest,
    ExecExitView,
    ExecRequest,
    FitRequest,
    ForgetRequest,
    LogLine,
    NodeView,
    OutputsView,
    OutputView,
    ReportsView,
    RunProgress,
    RunView,
    ScaleRequest,
    SecretRequest,
    SnapshotRequest,
    SnapshotView,
    StudyRequest,
    StudyView,
    SubmitRequest,
)
from racimo.spec.build import FieldError, build_spec
from racimo.spec.errors import RacimoError
from racimo.spec.home import Home
from racimo.spec.quantity import format_size
from racimo.spec.run import RunSpec
from racimo.spec.study import StudySpec
from racimo.state.events import Record
from racimo.state.nouns import ENDED, Exit, Reason

if TYPE_CHECKING:
    from racimo.client.prepare import Prepared

DEFAULT_MAX_UPLOAD_BYTES = 512 * 10**6
NAMED_BESIDE = 5
WAIT_SLICE_S = 20.0
"""How long one request of `wait` may take."""
_RUN_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")


class Client:
    """Speaks to the cluster of `$RACIMO_ADDRESS`, else to the one of this machine, which is started if need be.

    `home`: another cluster of this machine. `say`: gets a sentence whenever something takes its time (default: stderr).
    Usable as a context manager. Every method raises `RacimoError` with a code of `docs/errors.md`.
    """

    def __init__(
        self,
        *,
        home: str | Path | None = None,
        may_start: bool = True,
        say: Say = to_stderr,
        transport: httpx.BaseTransport | None = None,
        finder: Finder | None = None,
    ) -> None:
        where = Home(Path(home).absolute()) if home is not None else None
        self._finder = finder or Finder(say, home=where, may_start=may_start)
        self._transport = transport
        self._session = Session(self._finder, say, transport)
        self._say = say

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self._session.close()

    def beside(self) -> "Client":
        """Another client of the same cluster, for another thread. It starts no cluster and says nothing."""
        return Client(say=lambda text: None, finder=self._finder.never_starting(), transport=self._transport)

    # Runs

    def submit(
        self, spec: RunSpec, root: str | Path | None = None, *, max_upload_bytes: int = DEFAULT_MAX_UPLOAD_BYTES
    ) -> RunView:
        """Checks the spec, sends the files that the cluster lacks, and submits. `root`: where its paths begin."""
        from racimo.client.prepare import prepare

        return self.submit_prepared(prepare(spec, None if root is None else Path(root)), max_upload_bytes)

    def submit_prepared(self, prepared: "Prepared", max_upload_bytes: int = DEFAULT_MAX_UPLOAD_BYTES) -> RunView:
        spec = prepared.spec
        self._session.begin()
        if prepared.folder is not None:
            if prepared.moved:
                self._say(f"the script lies elsewhere: sending its folder, {prepared.folder}")
            snapshot = self._upload(prepared.folder, spec.train_file, max_upload_bytes, spec)
            spec = msgspec.structs.replace(spec, snapshot=snapshot)
        request = SubmitRequest(spec=spec, request=secrets.token_hex(16))
        return self._session.call("POST", "/v1/runs", RunView, body=request)

    def tune(self, function: Callable[..., Any] | str, *, root: str | Path | None = None, **fields: Any) -> RunView:
        """Submits a tune run: `cluster.tune(train, space={"lr": "log 1e-5..1e-1"}, metric="loss", trials=50)`.

        `function` is the training function (of a file) or `FILE.py:FUNCTION`. `fields` are those of the study and of
        the run, by their names."""
        from racimo.client.tuning import tune_fields

        try:
            spec = build_spec(tune_fields(function, fields))
        except FieldError as error:
            raise error.as_racimo_error() from None
        return self.submit(spec, root)

    def upload(self, folder: Path, *, needs: str = "", max_upload_bytes: int = DEFAULT_MAX_UPLOAD_BYTES) -> str:
        """Sends a folder's files by content; the snapshot's id. `needs`: a path that must be among them."""
        return self._upload(folder, needs, max_upload_bytes, None)

    def _upload(self, folder: Path, needs: str, max_upload_bytes: int, spec: RunSpec | None) -> str:
        """`spec`: that of the run whose files these are. One that could never start is refused before they are sent."""
        from racimo.client.hash_cache import HashCache
        from racimo.client.snapshot import hash_files, scan, skipped_words
        from racimo.client.upload import Upload

        found = scan(folder, max_bytes=max_upload_bytes, home=self._finder.home.root)
        if needs and needs not in {file.path for file in found.files}:
            raise RacimoError("file-missing", f"{needs} is among the files that .racimoignore leaves out of {folder}")
        if found.skipped:
            self._say(f"left out: {skipped_words(found)}")
        entries = hash_files(found, HashCache(self._finder.home.root / "cache", folder))
        view = self._snapshot(entries)
        if view.missing:
            if spec is not None:
                self._session.call("POST", "/v1/fit", type(None), body=FitRequest(spec=spec))
            missing = set(view.missing)
            sources = {entry.sha256: file for file, entry in zip(found.files, entries, strict=True)}
            size_bytes = sum(sources[sha256].size_bytes for sha256 in missing)
            self._say(
                f"sending {format_size(size_bytes)} of {format_size(found.size_bytes)} in {len(found.files)} files "
                f"from {folder}"
            )
            upload = Upload(lambda: self.beside()._session)
            upload.send(self._session, [(sha256, sources[sha256]) for sha256 in view.missing])
        return view.id

    def _snapshot(self, entries: tuple[Any, ...]) -> SnapshotView:
        return self._session.call("POST", "/v1/snapshots", SnapshotView, body=SnapshotRequest(files=entries))

    def run(self, run: str) -> RunView:
        return self._session.call("GET", _run_path(run), RunView)

    def runs(self, *, all: bool = False, limit: int = 50) -> list[RunView]:
        """Newest first; ended ones only with `all`, except the most recent."""
        return self._session.call("GET", "/v1/runs", list[RunView], params={"all": int(all), "limit": limit})

    def wait(self, run: str, timeout_s: float | None = None) -> RunView:
        """Until the run has ended, or `timeout_s` seconds have passed; look at the view's `status`."""
        left_s = float("inf") if timeout_s is None else timeout_s
        while True:
            slice_s = min(WAIT_SLICE_S, left_s)
            view = self._session.call(
                "GET",
                f"{_run_path(run)}/wait",
                RunView,
                params={"timeout_s": slice_s},
                timeout_s=slice_s + 30,
                following=True,
            )
            left_s -= slice_s
            if view.status in ENDED or left_s <= 0:
                return view

    def stop(self, run: str) -> RunView:
        return self._session.call("POST", f"{_run_path(run)}/stop", RunView)

    def pause(self, run: str) -> RunView:
        return self._session.call("POST", f"{_run_path(run)}/pause", RunView)

    def resume(self, run: str) -> RunView:
        return self._session.call("POST", f"{_run_path(run)}/resume", RunView)

    def scale(self, run: str, workers: str | int) -> RunView:
        """`workers`: a count or a range such as `"2..4"`."""
        return self._session.call("POST", f"{_run_path(run)}/scale", RunView, body=ScaleRequest(workers=workers))

    # What runs say

    def logs(
        self, run: str, *, follow: bool = False, worker: str | int = "", tail: int | None = None
    ) -> Iterator[LogLine]:
        """With `follow` until the run has ended; goes on by itself if the control process is restarted meanwhile."""
        return streams.logs(
            self._session,
            _run_name(run),
            follow=follow,
            worker=str(worker),
            tail=tail,
            wait_view=lambda: self.run(run),
        )

    def events(self, run: str, *, follow: bool = False) -> Iterator[Record]:
        return streams.events(self._session, _run_name(run), follow=follow)

    def progress(self, run: str, *, follow: bool = False) -> Iterator[RunProgress]:
        return streams.progress(self._session, _run_name(run), follow=follow)

    def reports(self, run: str, after: int = 0) -> ReportsView:
        """What workers reported with `run.report(...)`, from number `after` on; go on with the view's `next`."""
        return self._session.call("GET", f"{_run_path(run)}/reports", ReportsView, params={"after": after})

    def trials(self, run: str, after: int = -1, wait_s: float = 0.0) -> StudyView:
        """The trials of a tune run; with `after`, the view's `seq`, those that changed since. Waits up to `wait_s` for
        a change."""
        return self._session.call(
            "GET", f"{_run_path(run)}/trials", StudyView, params={"after": after, "wait_s": wait_s}
        )

    def change_study(self, run: str, study: StudySpec, *, other_space: bool = False) -> StudyView:
        """Goes on with a tune run, also one that has ended, under other terms. `space-changed` unless `other_space`."""
        body = StudyRequest(study=study, other_space=other_space)
        return self._session.call("POST", f"{_run_path(run)}/study", StudyView, body=body)

    def why(self, run: str) -> Reason:
        return self._session.call("GET", f"{_run_path(run)}/why", Reason)

    # Outputs and commands beside a worker

    def outputs(self, run: str, *, node: str = "") -> list[OutputView]:
        """What the run left on all its nodes, or on one; those that do not answer are named to `say`."""
        view = self._session.call("GET", f"{_run_path(run)}/outputs{_on_node(node)}", OutputsView)
        if view.away:
            self._session.say(f"outputs that lie only on {', '.join(view.away)} are not listed: no answer from there")
        if view.beside:
            more = f" and {len(view.beside) - NAMED_BESIDE} more" if len(view.beside) > NAMED_BESIDE else ""
            self._session.say(
                f"{run} left in its working folder {', '.join(view.beside[:NAMED_BESIDE])}{more}: no outputs, gone"
                " with the run's files (write results to $RACIMO_OUTPUT_DIR)"
            )
        return list(view.files)

    def download(self, run: str, path: str, to: str | Path, *, node: str = "") -> Path:
        """One output into the file `to`, which appears whole or not at all. `node`: the one to take it from."""
        target = Path(to)
        target.parent.mkdir(parents=True, exist_ok=True)
        draft = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            with open(draft, "wb") as file:
                for chunk in self.read_output(run, path, node=node):
                    file.write(chunk)
            draft.replace(target)
        except OSError as error:
            raise RacimoError("file-unreadable", f"cannot write {target}: {error.strerror}") from None
        finally:
            draft.unlink(missing_ok=True)
        return target

    def read_output(self, run: str, path: str, *, node: str = "") -> Iterator[bytes]:
        url = f"{_run_path(run)}/outputs/{quote(path, errors='backslashreplace')}{_on_node(node)}"
        try:
            with self._session.open_stream("GET", url) as answer:
                yield from answer.iter_bytes()
        except httpx.TransportError as error:
            raise self._session.unreachable(f"lost the connection while reading {path}: {error}") from None

    def exec(self, run: str, command: Sequence[str], worker: str | int = "") -> Iterator[LogLine | Exit]:
        """Runs a command beside a worker (same folder and environment): its lines, and its `Exit` last."""
        line_decoder, exit_decoder = msgspec.json.Decoder(LogLine), msgspec.json.Decoder(ExecExitView)
        body = ExecRequest(command=tuple(command), worker=str(worker))
        for line in streams.once(self._session, "POST", f"{_run_path(run)}/exec", body):
            if line.startswith(b'{"exit"'):
                yield exit_decoder.decode(line).exit
                return
            yield line_decoder.decode(line)

    # The cluster

    def cluster(self) -> ClusterView:
        return self._session.call("GET", "/v1/cluster", ClusterView)

    def nodes(self) -> list[NodeView]:
        return self._session.call("GET", "/v1/nodes", list[NodeView])

    def drain(self, node: str, *, deadline_s: float | None = None, undo: bool = False) -> None:
        """Gives a node nothing new and moves what runs there; `deadline_s` from now the rest is stopped."""
        body = DrainRequest(deadline_s=deadline_s, undo=undo)
        self._session.call("POST", f"{_node_path(node)}/drain", type(None), body=body)

    def forget_node(self, node: str, *, confirm_dead: bool = False) -> None:
        """Gives up a node that does not answer. `confirm_dead`: nothing runs there any more, for certain."""
        body = ForgetRequest(confirm_dead=confirm_dead)
        self._session.call("POST", f"{_node_path(node)}/forget", type(None), body=body)

    def backup(self, to: str | Path) -> Path:
        """All that makes this cluster this cluster, into the new file `to` (0600): whoever reads it can do what the
        cluster can."""
        target = Path(to)
        draft = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                with self._session.open_stream("POST", "/v1/backup") as answer:
                    for chunk in answer.iter_bytes():
                        file.write(chunk)
                file.flush()
                os.fsync(file.fileno())
            draft.replace(target)
        except OSError as error:
            raise RacimoError("file-unreadable", f"cannot write {target}: {error.strerror}") from None
        except httpx.TransportError as error:
            raise self._session.unreachable(f"lost the connection during the backup: {error}") from None
        finally:
            draft.unlink(missing_ok=True)
        return target

    def secrets(self) -> list[str]:
        """Names only: values never leave the cluster."""
        return self._session.call("GET", "/v1/secrets", list[str])

    def set_secret(self, name: str, value: str) -> None:
        self._session.call(
            "PUT",
            f"/v1/secrets/{quote(name, safe='', errors='backslashreplace')}",
            type(None),
            body=SecretRequest(value=value),
        )

    def remove_secret(self, name: str) -> None:
        self._session.call("DELETE", f"/v1/secrets/{quote(name, safe='', errors='backslashreplace')}", type(None))

    def shutdown(self) -> DownView:
        """Ends the cluster: which runs end with it and which go on at the next `up`. `racimo down` also waits."""
        return self._session.call("POST", "/v1/shutdown", DownView, safe_to_repeat=False)


def _on_node(node: str) -> str:
    return f"?node={quote(node, safe='')}" if node else ""


def _node_path(node: str) -> str:
    if not _RUN_NAME.fullmatch(node):
        raise RacimoError("node-unknown", f"there is no node {node!r}", "racimo nodes")
    return f"/v1/nodes/{node}"


def _run_path(run: str) -> str:
    return f"/v1/runs/{_run_name(run)}"


def _run_name(run: str) -> str:
    """For a path. What no run can be called would be read as another path there: `RacimoError` run-unknown."""
    if not _RUN_NAME.fullmatch(run):
        raise RacimoError("run-unknown", f"there is no run {run!r}", "racimo ps --all")
    return run


def submit(*, root: str | Path | None = None, client: Client | None = None, **fields: Any) -> RunView:
    """Submits a run given by the fields of its spec: `racimo.submit(train="train.py", workers="2..4")`."""
    try:
        spec = build_spec(fields)
    except FieldError as error:
        raise error.as_racimo_error() from None
    if client is not None:
        return client.submit(spec, root)
    with Client() as own:
        return own.submit(spec, root)
