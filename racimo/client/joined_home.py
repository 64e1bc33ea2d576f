"""The home of a machine that joined another's cluster: what makes it a node's, and what is taken out of it again."""

import shutil
from pathlib import Path

import msgspec

from racimo.control.private_files import write_private
from racimo.spec.config import ClusterConfig, ClusterFile, JoinConfig, Token
from racimo.spec.errors import RacimoError
from racimo.spec.home import Home

_LEFT_BEHIND = ("workers", "files", "runs", "events.jsonl")
"""What a node keeps for one cluster and no other."""


def forget_cluster(home: Home) -> None:
    """Removes what makes this home a node of its cluster; outputs, logs and its name stay."""
    for path in (
        home.join_file,
        home.cluster_file,
        home.certificate_file,
        home.token_file,
        home.config_file,
        home.link_file,
    ):
        path.unlink(missing_ok=True)


def write_joined_home(
    home: Home,
    token: Token,
    certificate: bytes,
    config: ClusterConfig,
    cluster: ClusterFile,
    joined: JoinConfig,
    *,
    name: str = "",
) -> None:
    """Makes this home a node's; all files 0600. `certificate`: the head's, PEM. `name`: the node's, "" for the one that
    it has or will choose. `RacimoError`: start-failed, and what `check_joined_home` raises."""
    from racimo.control.home_check import check_joined_home

    check_joined_home(home)
    try:
        for folder in (home.root, home.service_logs_dir, home.processes_dir, home.node_dir):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if folder.stat().st_mode & 0o077 and folder.resolve() != Path.home().resolve():
                folder.chmod(0o700)  # logs and outputs below it are nobody else's to read
        _clear_of_other_cluster(home, cluster.id)
        if name:
            write_private(home.node_dir / "id", name.encode())
        home.link_file.unlink(missing_ok=True)
        write_private(home.token_file, str(token).encode())
        write_private(home.certificate_file, certificate)
        write_private(home.config_file, msgspec.json.encode(config))
        write_private(home.cluster_file, msgspec.json.encode(cluster))
        write_private(home.join_file, msgspec.json.encode(joined))  # last: with it this home is a node's
    except OSError as error:
        raise RacimoError("start-failed", f"cannot write in {home.root}: {error.strerror}") from None


def clear_of_former_cluster(home: Home) -> None:
    """A home that was a node's and becomes a head's. `OSError`."""
    mark = home.node_dir / "cluster"
    if mark.exists():
        _clear_of_other_cluster(home, "")
        mark.unlink()


def _clear_of_other_cluster(home: Home, cluster: str) -> None:
    """A node that was in another cluster knows runs by names that mean other runs here."""
    mark = home.node_dir / "cluster"
    former = mark.read_text().strip() if mark.exists() else ""
    if former and former != cluster:
        for name in _LEFT_BEHIND:
            path = home.node_dir / name
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        outputs = home.output_dir("")
        if outputs.is_dir():
            outputs.rename(home.root / f"outputs-{former}")
    write_private(mark, cluster.encode())
