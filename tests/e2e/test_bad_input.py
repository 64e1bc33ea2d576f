"""Bad input gets a clear error with its code, at once, and nothing is left behind."""

import json
from pathlib import Path

import httpx
import pytest
from live_cluster import LiveCluster

import racimo
from racimo.version import PROTOCOL_VERSION

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize(
    ("words", "exit_code", "said"),
    [
        (["train", "nowhere.py"], 2, ["file-missing", "nowhere.py"]),
        (["train", "broken.py"], 2, ["SyntaxError", "line 1", "def train(config)"]),
        (["train", "tiny.py:nothing"], 2, ["function-missing", "nothing"]),
        (["train", "needs_module.py"], 1, ["module-missing", "a_module_that_nobody_has"]),
        (["run", "--workers", "9", "--", "true"], 4, ["can-never-fit", "9", "4"]),
        (["run", "--devices", "h100:2", "--", "true"], 4, ["can-never-fit", "h100"]),
        (["run", "--env", "no-such-lock.txt", "--", "true"], 2, ["file-missing", "no-such-lock.txt"]),
        (["run", "--secret", "NOT_SET", "--", "true"], 2, ["secret-missing", "NOT_SET"]),
        (["show", "nobody-7"], 2, ["run-unknown", "nobody-7"]),
        (["show", "a/b?c"], 2, ["run-unknown", "a/b?c"]),
        (["show", ""], 2, ["run-unknown"]),
        (["run", "--", "echo", "\udcff"], 2, ["invalid-spec", "command", r"\udcff"]),
        (["run", "--variable", "A=\udcff", "--", "true"], 2, ["invalid-spec", "variables", r"\udcff"]),
        (["run", "--workers", "zero", "--", "true"], 2, ["zero"]),
        (["run", "--", "no-such-program-here"], 1, ["no-such-program-here"]),
    ],
)
def test_what_cannot_be_is_refused_with_its_code(
    cluster: LiveCluster, words: list[str], exit_code: int, said: list[str]
) -> None:
    done = cluster.cli(*words)
    assert done.returncode == exit_code, done.stderr
    for piece in said:
        assert piece in done.stderr
    assert str(Path(racimo.__file__).parent) not in done.stderr, "no traceback of ours reaches a user"


def test_an_unreadable_file_is_named(cluster: LiveCluster, tmp_path) -> None:
    (tmp_path / "train.py").mkdir()
    done = cluster.cli("train", "train.py", cwd=tmp_path)
    assert done.returncode == 2 and "file-unreadable" in done.stderr


def test_a_worker_that_raises_shows_the_first_traceback_and_counts_the_others(cluster: LiveCluster) -> None:
    done = cluster.cli("train", "raises.py", "--workers", "3")
    assert done.returncode == 1
    assert "cannot go on" in done.stderr and "in deep" in done.stderr and "worker-raised" in done.stderr


def test_a_wrong_token_gets_401_and_nothing_more(cluster: LiveCluster) -> None:
    address = json.loads(cluster.home.cluster_file.read_bytes())["address"]
    headers = {"Authorization": "Bearer wrong", "Racimo-Protocol": str(PROTOCOL_VERSION)}
    for path in ("/v1/cluster", "/v1/runs", "/v1/nothing-here"):
        answer = httpx.get(address + path, headers=headers)
        assert answer.status_code == 401
        assert set(answer.json()) <= {"code", "message", "hint"} and "racimo" not in answer.headers.get("server", "")


def test_a_client_of_another_version_is_told_both_versions(cluster: LiveCluster) -> None:
    address = json.loads(cluster.home.cluster_file.read_bytes())["address"]
    token = cluster.home.token_file.read_text().strip()
    headers = {"Authorization": f"Bearer {token}", "Racimo-Protocol": "999"}
    answer = httpx.get(address + "/v1/cluster", headers=headers)
    assert answer.status_code == 426
    assert "999" in answer.text and str(PROTOCOL_VERSION) in answer.text


def test_files_of_the_cluster_are_private(cluster: LiveCluster) -> None:
    for path in (
        cluster.home.token_file,
        cluster.home.cluster_file,
        cluster.home.journal_file,
        cluster.home.agent_socket,
    ):
        assert path.stat().st_mode & 0o077 == 0, path
    assert cluster.home.root.stat().st_mode & 0o077 == 0


def test_a_dataset_shorter_than_one_batch_is_named(cluster: LiveCluster) -> None:
    done = cluster.cli("train", "misuse.py:short_dataset")
    assert done.returncode == 1 and "dataset-too-small" in done.stderr


def test_more_workers_than_micro_shards_are_refused(cluster: LiveCluster) -> None:
    done = cluster.cli("train", "misuse.py:two_micro_shards", "--workers", "3")
    assert done.returncode == 1 and "too-many-workers" in done.stderr


@pytest.mark.parametrize("function", ["batch_norm", "own_collectives"])
def test_what_cannot_be_kept_exact_is_refused_with_the_reason(cluster: LiveCluster, function: str) -> None:
    done = cluster.cli("train", f"misuse.py:{function}")
    assert done.returncode == 1
    assert {"batch_norm": "not-exact", "own_collectives": "own-collectives"}[function] in done.stderr


def test_a_hang_is_named_with_rank_and_line(cluster: LiveCluster) -> None:
    done = cluster.cli("train", "misuse.py:hang", "--workers", "2", "--hang-after", "3s")
    assert done.returncode == 1
    for piece in ("worker-hung", "rank 1", "misuse.py"):
        assert piece in done.stderr


def test_a_worker_out_of_memory_is_named_as_such(cluster: LiveCluster) -> None:
    done = cluster.cli("run", "--memory", "200MB", "--", "python3", "-c", "x = bytearray(2_000_000_000); input()")
    assert done.returncode == 1 and "out-of-memory" in done.stderr


def test_one_worker_that_leaves_early_is_named(cluster: LiveCluster) -> None:
    done = cluster.cli("train", "misuse.py:one_leaves", "--workers", "2")
    assert done.returncode == 1 and "worker-left-early" in done.stderr
