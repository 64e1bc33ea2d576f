"""Which files belong to a run, how big they are, and sending by content."""

import contextlib
import os
import sqlite3
import tarfile
from pathlib import Path

import pytest

from racimo.client import snapshot
from racimo.client.hash_cache import HashCache
from racimo.client.snapshot import hash_files, read_parts, scan
from racimo.control import backup
from racimo.spec.errors import RacimoError
from racimo.spec.home import Home

LIMIT_BYTES = 10**6


def write(root: Path, *names: str, size: int = 3) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"x" * size)


def paths(root: Path, **settings: object) -> list[str]:
    return [file.path for file in scan(root, max_bytes=LIMIT_BYTES, **settings).files]  # type: ignore[arg-type]


def test_git_virtual_environments_and_caches_stay_here(tmp_path: Path) -> None:
    write(
        tmp_path,
        "train.py",
        ".git/objects/a",
        "pkg/__pycache__/m.pyc",
        "pkg/m.py",
        "venv/pyvenv.cfg",
        "venv/lib/x.py",
        ".mypy_cache/CACHEDIR.TAG",
        ".mypy_cache/x.json",
    )
    assert paths(tmp_path) == ["pkg/m.py", "train.py"]


def test_backups_of_a_cluster_and_what_get_fetched_stay_here_and_are_named(tmp_path: Path) -> None:
    write(tmp_path, "a.py", "echo-1/model.pt", f"echo-1/{snapshot.FETCHED_MARK}", "data/plain.tar")
    home = Home(tmp_path / "home")
    with contextlib.closing(sqlite3.connect(":memory:")) as empty:
        home.journal_file.parent.mkdir(parents=True)
        with contextlib.closing(sqlite3.connect(home.journal_file)) as journal:
            empty.backup(journal)
    with backup.make(home, backup.about_now("c-1", 0.0)) as file:
        (tmp_path / "old-head.bin").write_bytes(file.read())
    with tarfile.open(tmp_path / "data/plain.tar", "w") as tar:
        tar.add(tmp_path / "a.py")
    found = scan(tmp_path, max_bytes=LIMIT_BYTES, home=home.root)
    assert [file.path for file in found.files] == ["a.py", "data/plain.tar"]
    assert "echo-1/ (fetched by racimo get" in found.skipped[0] and "old-head.bin (a backup" in found.skipped[1]


def test_the_clusters_own_home_stays_here(tmp_path: Path) -> None:
    write(tmp_path, "a.py", "home/control/journal.db")
    assert paths(tmp_path, home=tmp_path / "home") == ["a.py"]


def test_racimoignore_speaks_gitignore(tmp_path: Path) -> None:
    write(
        tmp_path,
        "a.log",
        "keep.log",
        "data/big.bin",
        "sub/data/big.bin",
        "sub/b.log",
        "sub/c.txt",
        "build/x",
        "s/build/y",
    )
    (tmp_path / ".racimoignore").write_text("*.log\n!keep.log\ndata/\n/build\n# a comment\n")
    assert paths(tmp_path) == ["keep.log", "s/build/y", "sub/c.txt"]


def test_a_deeper_racimoignore_has_the_last_word(tmp_path: Path) -> None:
    write(tmp_path, "a.log", "sub/b.log", "sub/c.log")
    (tmp_path / ".racimoignore").write_text("*.log\n")
    (tmp_path / "sub" / ".racimoignore").write_text("!b.log\n")
    assert paths(tmp_path) == ["sub/b.log"]


def test_links_inside_are_kept_as_what_they_lead_to_and_others_named(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    write(root, "pkg/m.py")
    write(outside, "secret")
    (root / "link.py").symlink_to("pkg/m.py")
    (root / "linked_pkg").symlink_to("pkg")
    (root / "out").symlink_to(outside)
    (root / "gone").symlink_to("nowhere")
    (root / "pkg" / "up").symlink_to("..")
    found = scan(root, max_bytes=LIMIT_BYTES)
    assert [file.path for file in found.files] == ["link.py", "linked_pkg/m.py", "pkg/m.py"]
    assert sorted(words.split(" ")[0] for words in found.skipped) == ["gone", "linked_pkg/up", "out", "pkg/up"]
    assert "out of the folder" in snapshot.skipped_words(found)


def test_a_pipe_is_no_file(tmp_path: Path) -> None:
    write(tmp_path, "a")
    os.mkfifo(tmp_path / "pipe")
    found = scan(tmp_path, max_bytes=LIMIT_BYTES)
    assert [file.path for file in found.files] == ["a"]
    assert found.skipped == ("pipe (not a file)",)


def test_too_much_is_refused_with_the_largest_folders_named(tmp_path: Path) -> None:
    """ray#45602, ray#22043: an upload limit is hit and nothing says what the bulk was."""
    write(tmp_path, "data/one", "data/two", size=600_000)
    write(tmp_path, "checkpoints/last", size=300_000)
    write(tmp_path, "train.py")
    with pytest.raises(RacimoError) as caught:
        scan(tmp_path, max_bytes=LIMIT_BYTES)
    assert caught.value.code == "upload-too-large"
    assert "1.5 MB in 4 files, more than 1.0 MB; the largest: data/ 1.2 MB, checkpoints/ 300 kB" in caught.value.message
    assert ".racimoignore" in caught.value.hint and "--max-upload 1.7MB" in caught.value.hint


def test_too_many_files_are_refused_with_the_fullest_folders_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot, "MAX_FILES", 3)
    write(tmp_path, "a", "many/1", "many/2", "many/3")
    with pytest.raises(RacimoError, match="4 files, more than 3: many/ 3 files, a 1 files"):
        scan(tmp_path, max_bytes=LIMIT_BYTES)


def test_a_file_too_large_for_one_blob_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "MAX_BLOB_BYTES", 10)
    write(tmp_path, "weights.bin", size=11)
    with pytest.raises(RacimoError, match=r"weights\.bin has 11 B; a single file has at most 10 B"):
        scan(tmp_path, max_bytes=LIMIT_BYTES)


def test_a_folder_that_is_none_is_named(tmp_path: Path) -> None:
    write(tmp_path, "file")
    for name, code in (("nowhere", "file-missing"), ("file", "file-unreadable")):
        with pytest.raises(RacimoError) as caught:
            scan(tmp_path / name, max_bytes=LIMIT_BYTES)
        assert caught.value.code == code


def test_an_unreadable_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "a")
    found = scan(tmp_path, max_bytes=LIMIT_BYTES)
    (tmp_path / "a").unlink()
    with pytest.raises(RacimoError) as caught:
        hash_files(found, HashCache(None, tmp_path))
    assert caught.value.code == "file-unreadable" and str(tmp_path / "a") in caught.value.message


def test_mode_size_and_content_are_told(tmp_path: Path) -> None:
    write(tmp_path, "run.sh")
    (tmp_path / "run.sh").chmod(0o755)
    (entry,) = hash_files(scan(tmp_path, max_bytes=LIMIT_BYTES), HashCache(None, tmp_path))
    assert (entry.path, entry.mode, entry.size_bytes) == ("run.sh", 0o755, 3)
    assert entry.sha256 == "cd2eb0837c9b4c962c22d2ff8b5441b7b45805887f051d39bf133b583baf6860"


def age(path: Path) -> None:
    old_s = path.stat().st_mtime - 60
    os.utime(path, (old_s, old_s))


def test_only_what_changed_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "root"
    write(root, "a", "b")
    age(root / "a"), age(root / "b")
    hash_files(scan(root, max_bytes=LIMIT_BYTES), HashCache(tmp_path / "cache", root))
    (root / "b").write_bytes(b"other")
    hashed: list[str] = []
    original = snapshot._hash
    monkeypatch.setattr(snapshot, "_hash", lambda path: hashed.append(path.name) or original(path))
    hash_files(scan(root, max_bytes=LIMIT_BYTES), HashCache(tmp_path / "cache", root))
    assert hashed == ["b"]


def test_a_file_changed_a_moment_ago_is_not_remembered(tmp_path: Path) -> None:
    """It could change again without its modification time moving on."""
    root = tmp_path / "root"
    write(root, "a")
    hash_files(scan(root, max_bytes=LIMIT_BYTES), HashCache(tmp_path / "cache", root))
    status = (root / "a").stat()
    cache = HashCache(tmp_path / "cache", root)
    assert cache.get("a", status.st_size, status.st_mtime_ns, status.st_ino) is None


def test_a_damaged_cache_only_costs_time(tmp_path: Path) -> None:
    root = tmp_path / "root"
    write(root, "a")
    age(root / "a")
    hash_files(scan(root, max_bytes=LIMIT_BYTES), HashCache(tmp_path / "cache", root))
    (kept,) = (tmp_path / "cache").iterdir()
    kept.write_bytes(b"{torn")
    assert len(hash_files(scan(root, max_bytes=LIMIT_BYTES), HashCache(tmp_path / "cache", root))) == 1


def test_a_file_that_changes_while_it_is_sent_is_named(tmp_path: Path) -> None:
    write(tmp_path, "a")
    found = scan(tmp_path, max_bytes=LIMIT_BYTES)
    (entry,) = hash_files(found, HashCache(None, tmp_path))
    (tmp_path / "a").write_bytes(b"later")
    with pytest.raises(RacimoError, match="changed while it was being sent"):
        list(read_parts(found.files[0], entry.sha256))


def test_a_file_that_changed_is_never_sent_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "READ_BYTES", 4)
    write(tmp_path, "a", size=11)
    found = scan(tmp_path, max_bytes=LIMIT_BYTES)
    (entry,) = hash_files(found, HashCache(None, tmp_path))
    assert list(read_parts(found.files[0], entry.sha256)) == [b"xxxx", b"xxxx", b"xxx"]
    (tmp_path / "a").write_bytes(b"x" * 10 + b"y")
    sent = []
    with pytest.raises(RacimoError, match="changed while it was being sent"):
        for part in read_parts(found.files[0], entry.sha256):
            sent.append(part)
    assert b"".join(sent) == b"x" * 8


def test_a_name_that_is_no_utf_8_is_refused_and_shown_unless_it_is_left_out(tmp_path: Path) -> None:
    write(tmp_path, "train.py", os.fsdecode(b"data/bad\xff.txt"))
    with pytest.raises(RacimoError) as caught:
        paths(tmp_path)
    assert caught.value.code == "file-unreadable"
    assert r"data/bad\udcff.txt" in caught.value.message
    (tmp_path / ".racimoignore").write_text("data/\n")
    assert paths(tmp_path) == ["train.py"]
