"""Backups: everything that makes the cluster is in one, and nothing but that is ever taken from one."""

import io
import tarfile
from pathlib import Path

import msgspec
import pytest

from racimo.act.journal import SqliteJournal
from racimo.client.restore import restore
from racimo.control import backup
from racimo.spec.errors import RacimoError
from racimo.spec.home import Home
from racimo.state.events import NodeSilent, Record

SECRETS = {"token": b"the-secret", "control/secrets.json": b"{}", "control/cluster.key": b"key", "node/id": b"n-1"}


@pytest.fixture
def home(tmp_path: Path) -> Home:
    made = Home(tmp_path / "home")
    for name, content in {**SECRETS, "config.json": b"{}", f"control/blobs/{'a' * 64}": b"blob"}.items():
        path = made.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    (made.blobs_dir / ".draft-1").write_bytes(b"half an upload")
    return made


def take(home: Home, to: Path) -> Path:
    with backup.make(home, backup.about_now("c-1", 5.0)) as made:
        to.write_bytes(made.read())
    return to


def test_what_was_durable_is_in_the_backup_while_the_journal_is_in_use(home: Home, tmp_path: Path) -> None:
    journal = SqliteJournal(home.journal_file)
    journal.load()
    for seq in (1, 2):
        journal.append(Record(seq=seq, at_s=1.0, wall_s=1.0, event=NodeSilent(node="n")))
    journal.commit()
    journal.append(Record(seq=3, at_s=1.0, wall_s=1.0, event=NodeSilent(node="n")))  # not durable
    file = take(home, tmp_path / "b.tar")
    journal.close()
    again, said = Home(tmp_path / "again"), []
    assert restore(again, file, said.append).cluster == "c-1" and "c-1" in said[0]
    for name, content in SECRETS.items():
        path = again.root / name
        assert path.read_bytes() == content and path.stat().st_mode & 0o777 == 0o600, name
    assert (again.blobs_dir / ("a" * 64)).read_bytes() == b"blob"
    assert not list(again.blobs_dir.glob(".draft*"))
    opened = SqliteJournal(again.journal_file)
    assert opened.durable_seq == 2 and not opened.notes
    opened.close()


def tar(path: Path, *members: tuple[str, bytes, bytes]) -> Path:
    with tarfile.open(path, "w") as made:
        for name, kind, content in members:
            member = tarfile.TarInfo(name)
            member.type, member.size, member.linkname = kind, len(content), "/etc/passwd"
            made.addfile(member, io.BytesIO(content))
    return path


ABOUT = (backup.ABOUT, tarfile.REGTYPE, msgspec.json.encode(backup.about_now("c-1", 5.0)))


@pytest.mark.parametrize(
    "member",
    [
        ("../token", tarfile.REGTYPE, b"x"),
        ("/etc/cron.d/x", tarfile.REGTYPE, b"x"),
        ("token", tarfile.SYMTYPE, b""),
        ("logs/control.log", tarfile.REGTYPE, b"x"),
        ("control/blobs/../../x", tarfile.REGTYPE, b"x"),
    ],
)
def test_paths_that_no_backup_has_are_refused_and_nothing_is_written(
    member: tuple[str, bytes, bytes], tmp_path: Path
) -> None:
    home = Home(tmp_path / "deep" / "home")
    with pytest.raises(RacimoError) as caught:
        restore(home, tar(tmp_path / "b.tar", ABOUT, member), lambda text: None)
    assert caught.value.code == "file-unreadable" and "no whole backup: it holds" in caught.value.message
    assert not list((tmp_path / "deep").rglob("*")) if (tmp_path / "deep").exists() else True


def test_a_torn_backup_is_refused_and_the_home_is_as_it_was(home: Home, tmp_path: Path) -> None:
    SqliteJournal(home.journal_file).close()
    file = take(home, tmp_path / "b.tar")
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    again = Home(tmp_path / "again")
    with pytest.raises(RacimoError) as caught:
        restore(again, file, lambda text: None)
    assert caught.value.code == "file-unreadable" and not again.root.exists()
    for missing in (tmp_path / "nothing.tar", home.token_file):
        with pytest.raises(RacimoError):
            restore(again, missing, lambda text: None)


def test_a_home_with_a_cluster_is_left_alone(home: Home, tmp_path: Path) -> None:
    with pytest.raises(RacimoError) as caught:
        restore(home, tmp_path / "b.tar", lambda text: None)
    assert caught.value.code == "wrong-state" and "holds a cluster already" in caught.value.message
