import hashlib
from pathlib import Path
from typing import Any

import pytest

from racimo.agent.protocol import FileEntry
from racimo.control.bundle import framed
from racimo.control.snapshots import MAX_BLOB_BYTES, SnapshotStore, check_manifest, snapshot_id
from racimo.spec.errors import RacimoError

SHA = "a" * 64


def entry(path: str, **other: Any) -> FileEntry:
    return FileEntry(**{"path": path, "mode": 0o644, "size_bytes": 1, "sha256": SHA, **other})


def store(root: Path) -> SnapshotStore:
    return SnapshotStore(root / "blobs", root / "snapshots")


@pytest.mark.parametrize(
    "path", ["/etc/passwd", "../x", "a/../x", "a//b", "./a", "a/", "", ".", "..", "a\0b", "a\\..\\b"]
)
def test_paths_that_leave_the_folder_are_refused(path: str) -> None:
    with pytest.raises(RacimoError) as caught:
        check_manifest((entry(path),))
    assert caught.value.code == "invalid-request"


@pytest.mark.parametrize("files", [
    (entry("a"), entry("a")), (entry("a"), entry("a/b")), (entry("a", sha256="x"),), (entry("a", mode=0o4755),),
    (entry("a", size_bytes=-1),), (entry("a", size_bytes=MAX_BLOB_BYTES + 1),),
])  # fmt: skip
def test_manifests_that_cannot_be_unpacked_are_refused(files: tuple[FileEntry, ...]) -> None:
    with pytest.raises(RacimoError):
        check_manifest(files)


def test_the_id_depends_on_the_files_and_not_on_their_order() -> None:
    assert snapshot_id((entry("a"), entry("b"))) == snapshot_id((entry("b"), entry("a")))
    assert snapshot_id((entry("a"),)) != snapshot_id((entry("a", mode=0o755),))


def test_a_content_is_kept_only_if_it_is_what_its_name_says(tmp_path: Path) -> None:
    made = store(tmp_path)
    content = b"x" * 100
    digest = hashlib.sha256(content).hexdigest()
    draft = made.draft(digest)
    draft.write(content[:50])
    with pytest.raises(RacimoError):
        draft.finish()
    draft.discard()
    assert list((tmp_path / "blobs").iterdir()) == []
    draft = made.draft(digest)
    draft.write(content[:50])
    draft.write(content[50:])
    draft.finish()
    draft.discard()
    assert made.read_blob(digest) == content
    assert (tmp_path / "blobs" / digest).stat().st_mode & 0o777 == 0o600
    identity, missing = made.put_manifest((entry("a", sha256=digest),))
    assert missing == ()
    assert store(tmp_path).require_complete(identity)[0].path == "a"


def test_uploads_cut_off_by_a_crash_are_swept_away(tmp_path: Path) -> None:
    store(tmp_path).draft(SHA).write(b"half")
    assert len(list((tmp_path / "blobs").iterdir())) == 1
    store(tmp_path)
    assert list((tmp_path / "blobs").iterdir()) == []


def test_a_blob_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("racimo.control.snapshots.MAX_BLOB_BYTES", 10)
    draft = store(tmp_path).draft(SHA)
    with pytest.raises(RacimoError) as caught:
        draft.write(b"x" * 11)
    assert caught.value.code == "upload-too-large"
    draft.discard()


@pytest.mark.parametrize("identity", ["../../etc/passwd", "", "x", SHA])
def test_unknown_snapshots_are_said(tmp_path: Path, identity: str) -> None:
    with pytest.raises(RacimoError) as caught:
        store(tmp_path).manifest(identity)
    assert caught.value.code == "not-found"


def test_what_no_run_names_is_collected_once_it_is_old(tmp_path: Path) -> None:
    contents = {name: name.encode() for name in ("shared", "old", "new")}
    sha = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
    snapshots = store(tmp_path)
    kept, _ = snapshots.put_manifest((entry("a", sha256=sha["shared"]), entry("b", sha256=sha["new"])))
    dropped, _ = snapshots.put_manifest((entry("a", sha256=sha["shared"]), entry("b", sha256=sha["old"])))
    for name, content in contents.items():
        draft = snapshots.draft(sha[name])
        draft.write(content)
        draft.finish()
    assert snapshots.collect({kept}) == 0, "all of it is young"
    assert snapshots.collect({kept}, min_age_s=-1.0) == 2
    assert len(snapshots.require_complete(kept)) == 2
    with pytest.raises(RacimoError):
        snapshots.manifest(dropped)


def test_a_bundle_is_stored_whole_and_one_wrong_content_is_refused(tmp_path: Path) -> None:
    kept = store(tmp_path)
    parts = [f"content {number}".encode() for number in range(2_000)]  # more than a process may have open
    digests = [hashlib.sha256(part).hexdigest() for part in parts]
    kept.put_bundle(b"".join(framed(digest, part) for digest, part in zip(digests, parts, strict=True)))
    assert [kept.read_blob(digest) for digest in digests] == parts
    with pytest.raises(RacimoError, match="has SHA-256"):
        kept.put_bundle(framed(digests[0], b"something else"))
    assert not list((tmp_path / "blobs").glob(".draft-*"))


@pytest.mark.parametrize("cut", [10, 40])
def test_a_bundle_that_is_cut_short_is_refused(tmp_path: Path, cut: int) -> None:
    kept = store(tmp_path)
    whole = framed(hashlib.sha256(b"content").hexdigest(), b"content")
    with pytest.raises(RacimoError, match="the bundle"):
        kept.put_bundle(whole[:cut])
