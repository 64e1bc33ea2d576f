"""What ssh says becomes one sentence and the command to type; what `racimo join` says there is passed on as it was."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

from racimo.cli.add import Board
from racimo.client.add import Wish, _join
from racimo.client.ssh import CommandFailed, Ssh
from racimo.spec.config import Token
from racimo.spec.errors import RacimoError

TOKEN = Token("very-secret", "0" * 64)


class FakeSsh:
    """Answers every call; keeps what it was called with."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, code: int, stdout: str = "", stderr: str = "") -> None:
        self.calls: list[tuple[list[str], bytes]] = []
        self.answer = subprocess.CompletedProcess([], code, stdout.encode(), stderr.encode())
        monkeypatch.setattr(subprocess, "run", self.run)

    def run(self, words: list[str], *, input: bytes, **settings: Any) -> subprocess.CompletedProcess[bytes]:
        self.calls.append((words, input))
        return self.answer


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (
            "@@@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @@@\nHost key verification failed.",
            "not the one that ssh",
        ),
        ("Host key verification failed.\r\n", "its host key is unknown here"),
        ("ana@gpu: Permission denied (publickey,password).", "asks for a password, or takes none of your keys"),
        ("ssh: connect to host gpu port 22: Connection timed out", "Connection timed out"),
        ("", "without a word"),
    ],
)
def test_what_ssh_would_ask_is_an_error_with_the_command_to_type(
    said: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    FakeSsh(monkeypatch, 255, stderr=said)
    with pytest.raises(RacimoError) as caught:
        Ssh("ana@gpu", Path("/etc/my config")).run("true", "a test", timeout_s=5)
    assert caught.value.code == "ssh-failed" and words in caught.value.message
    assert caught.value.hint.startswith("ssh -F '/etc/my config' ana@gpu true")


@pytest.mark.parametrize("target", ["", "-oProxyCommand=evil", "two words"])
def test_a_host_is_a_name_and_never_an_option(target: str) -> None:
    with pytest.raises(RacimoError) as caught:
        Ssh(target)
    assert caught.value.code == "invalid-request"


def test_nothing_is_asked_and_the_target_stands_behind_the_options(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeSsh(monkeypatch, 0, stdout="yes")
    assert Ssh("gpu").script("echo yes", "a test", timeout_s=5) == "yes"
    ((words, stdin),) = fake.calls
    assert "BatchMode=yes" in words and words[-3:] == ["--", "gpu", "exec /bin/sh -s"] and stdin == b"echo yes"


def test_the_token_goes_through_stdin_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeSsh(monkeypatch, 0, stdout='{"node": {"id": "gpu-1", "host": "gpu", "devices": []}, "cluster": {}}')
    added = _join(Ssh("gpu"), "10.0.0.1:7700", TOKEN, Wish(slots=2, service=True))
    assert added.node is not None and added.node.id == "gpu-1"
    ((words, stdin),) = fake.calls
    assert stdin == f"{TOKEN}\n".encode() and not [word for word in words if TOKEN.secret in word]
    assert words[-1].endswith("join 10.0.0.1:7700 --token-file - -o json --price 0.0 --slots 2 --service")


def test_what_join_says_there_comes_with_its_code_and_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    error = '{"code":"clock-off","message":"it is 5m behind","hint":"timedatectl set-ntp true"}'
    FakeSsh(monkeypatch, 3, stderr=f"racimo: asking the head\n{error}\n")
    with pytest.raises(RacimoError) as caught:
        _join(Ssh("gpu"), "10.0.0.1:7700", TOKEN, Wish())
    assert (caught.value.code, caught.value.message) == ("clock-off", "gpu: it is 5m behind")
    FakeSsh(monkeypatch, 127, stderr="sh: 1: .racimo/venv/bin/racimo: not found\n")
    with pytest.raises(RacimoError, match=r"^gpu: racimo join failed: .*not found"):
        _join(Ssh("gpu"), "10.0.0.1:7700", TOKEN, Wish())


def test_who_is_a_node_already_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Typed again after some hosts failed, it must not fail for those that did not."""
    FakeSsh(monkeypatch, 3, stderr='{"code":"join-refused","message":"this machine has joined this cluster already"}')
    added = _join(Ssh("gpu"), "10.0.0.1:7700", TOKEN, Wish())
    assert added.error is None and "already" in added.note


def test_a_command_that_fails_is_said_with_its_last_line(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeSsh(monkeypatch, 1, stderr="Collecting torch\nERROR: No space left on device\n")
    with pytest.raises(CommandFailed, match="gpu: installing racimo failed: ERROR: No space left on device"):
        Ssh("gpu").script("pip", "installing racimo", timeout_s=5)


def test_one_line_per_host_is_rewritten_on_a_terminal_and_written_anew_elsewhere(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Board(["a", "bb"]).show("bb", "joining")
    assert capsys.readouterr().err == "racimo: bb: joining\n"
    monkeypatch.setattr("racimo.cli.add.is_terminal", lambda stream: True)
    board = Board(["a", "bb"])
    board.show("bb", "joining")
    shown = capsys.readouterr().err
    assert shown.count("\n") == 4 and "\x1b[2A" in shown and shown.endswith("bb  joining\n")
