from pathlib import Path

import pytest

from racimo.control.home_check import check_home, check_joined_home, filesystem_of, is_network
from racimo.spec.errors import RacimoError
from racimo.spec.home import Home

MOUNTINFO = r"""
21 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
22 21 0:5 / /proc rw,nosuid - proc proc rw
40 21 0:40 / /home rw,relatime shared:20 - nfs4 server:/export/home rw,vers=4.2
41 40 8:2 / /home/anna/local rw,relatime - xfs /dev/sdb1 rw
42 21 0:42 / /mnt/a\040share rw - cifs //server/share rw
43 21 0:43 / /net/sshd rw - fuse.sshfs user@host: rw
44 21 0:44 / /lustre rw - lustre mds@tcp:/fs rw
45 21 0:45 / /data rw shared:3 master:7 - fuse.rclone remote: rw
46 21 8:3 / /data rw - ext4 /dev/sdc1 rw
47 21 0:47 / /weka rw - wekafs weka rw
48 21 0:48 / /ntfs rw - fuseblk /dev/sdd1 rw
"""


@pytest.mark.parametrize(("path", "kind", "network"), [
    ("/home/anna/.racimo", "nfs4", True), ("/home/anna/local/.racimo", "xfs", False), ("/home", "nfs4", True),
    ("/homework/x", "ext4", False), ("/mnt/a share/x", "cifs", True), ("/net/sshd/deep/down", "fuse.sshfs", True),
    ("/lustre/x", "lustre", True), ("/data/x", "ext4", False), ("/weka/x", "wekafs", True),
    ("/ntfs/x", "fuseblk", False),
    ("/tmp/x", "ext4", False), ("/", "ext4", False),
])  # fmt: skip
def test_the_innermost_and_newest_mount_decides(path: str, kind: str, network: bool) -> None:
    found, _ = filesystem_of(path, MOUNTINFO)
    assert found == kind
    assert is_network(found) is network


def test_a_home_on_a_network_file_system_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("racimo.control.home_check.filesystem_of", lambda path, text: ("nfs4", "/home"))
    with pytest.raises(RacimoError) as caught:
        check_home(Home(tmp_path / "home"))
    assert caught.value.code == "home-on-network-filesystem"
    assert "nfs4" in caught.value.message and "RACIMO_HOME" in caught.value.hint
    assert not (tmp_path / "home").exists(), "nothing is left behind"


def test_a_home_is_made_private(tmp_path: Path) -> None:
    check_home(Home(tmp_path / "a" / "home"))
    assert (tmp_path / "a" / "home").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777, 0o720])
def test_a_home_that_others_can_write_is_refused(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    with pytest.raises(RacimoError) as caught:
        check_home(Home(tmp_path))
    assert caught.value.code == "home-not-private" and "chmod 700" in caught.value.hint


def test_a_file_is_no_home(tmp_path: Path) -> None:
    (tmp_path / "home").write_text("")
    with pytest.raises(RacimoError) as caught:
        check_home(Home(tmp_path / "home"))
    assert caught.value.code == "start-failed"


def on_nfs(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    monkeypatch.setattr("racimo.control.home_check.filesystem_of", lambda path, text: ("nfs4", "/home"))
    monkeypatch.setattr("racimo.control.home_check.socket.gethostname", lambda: host)


def test_a_joined_machines_home_may_be_on_a_network_file_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_nfs(monkeypatch, "one")
    for _ in range(2):
        check_joined_home(Home(tmp_path / "home"))


def test_two_machines_do_not_share_a_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Home folders that a file server gives to all machines of a lab."""
    on_nfs(monkeypatch, "one")
    check_joined_home(Home(tmp_path / "home"))
    on_nfs(monkeypatch, "two")
    with pytest.raises(RacimoError) as caught:
        check_joined_home(Home(tmp_path / "home"))
    assert caught.value.code == "join-refused" and "another machine, one" in caught.value.message
    assert "RACIMO_HOME=/var/tmp" in caught.value.hint


def test_a_joined_home_on_a_disk_of_its_own_may_follow_a_renamed_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_joined_home(Home(tmp_path / "home"))
    monkeypatch.setattr("racimo.control.home_check.socket.gethostname", lambda: "renamed")
    check_joined_home(Home(tmp_path / "home"))
    assert not (tmp_path / "home" / "node").exists()
