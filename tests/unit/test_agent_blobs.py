"""Contents by hash, and unpacking all or nothing."""

import hashlib
from pathlib import Path

import pytest

from racimo.agent.blobs import BlobStore
from racimo.agent.protocol import FileEntry
from racimo.spec.errors import RacimoError


def put(store: BlobStore, content: bytes) -> str:
    sha256 = hashlib.sha256(content).hexdigest()
    store.put(sha256, content)
    return sha256


def entry(path: str, sha256: str, mode: int = 0o644) -> FileEntry:
    return FileEntry(path, mode, 0, sha256)


def test_files_are_unpacked_with_folders_and_modes(tmp_path: Path) -> None:
    store = BlobStore(tmp_path / "blobs")
    sha256 = put(store, b"#!/bin/sh\n")
    store.unpack((entry("bin/go.sh", sha256, 0o755), entry("same.sh", sha256)), tmp_path / "files" / "1")
    assert (tmp_path / "files/1/bin/go.sh").stat().st_mode & 0o777 == 0o755
    assert (tmp_path / "files/1/same.sh").read_bytes() == b"#!/bin/sh\n"


def test_what_a_run_changes_in_its_folder_does_not_change_the_content(tmp_path: Path) -> None:
    store = BlobStore(tmp_path / "blobs")
    sha256 = put(store, b"content")
    store.unpack((entry("a", sha256),), tmp_path / "one")
    (tmp_path / "one/a").write_bytes(b"changed")
    store.unpack((entry("a", sha256),), tmp_path / "two")
    assert (tmp_path / "two/a").read_bytes() == b"content"


def test_a_missing_content_is_named_and_unpacking_leaves_nothing(tmp_path: Path) -> None:
    store = BlobStore(tmp_path / "blobs")
    files = (entry("a", put(store, b"here")), entry("b", "0" * 64))
    assert store.missing(files) == ("0" * 64,)
    with pytest.raises(FileNotFoundError):
        store.unpack(files, tmp_path / "files" / "1")
    assert list((tmp_path / "files").iterdir()) == []


@pytest.mark.parametrize("path", ["/etc/passwd", "../out", "a/../../out"])
def test_a_path_that_leads_out_of_the_folder_is_refused(tmp_path: Path, path: str) -> None:
    store = BlobStore(tmp_path / "blobs")
    with pytest.raises(RacimoError, match="leads out"):
        store.unpack((entry(path, put(store, b"x")),), tmp_path / "files" / "1")
    assert list((tmp_path / "files").iterdir()) == []


def test_a_content_is_what_its_name_says(tmp_path: Path) -> None:
    store = BlobStore(tmp_path / "blobs")
    with pytest.raises(RacimoError, match="SHA-256"):
        store.put("0" * 64, b"other")
    assert store.missing((entry("a", "0" * 64),))


def test_the_least_recently_used_contents_go_beyond_the_bound(tmp_path: Path) -> None:
    import os

    store = BlobStore(tmp_path / "blobs", max_bytes=250)
    old, used = put(store, b"a" * 100), put(store, b"b" * 100)
    os.utime(store.path(old), (1, 1))
    os.utime(store.path(used), (2, 2))
    new = put(store, b"c" * 100)
    assert store.missing([entry("x", sha256) for sha256 in (old, used, new)]) == (old,)
