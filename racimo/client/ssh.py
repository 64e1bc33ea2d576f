"""The system's own ssh, without a question: what would ask is an error with the command to type instead.

Which hosts, keys and users there are, and how strict host keys are checked, is for the user's ssh configuration.
"""

import shlex
import subprocess
from pathlib import Path

from racimo.spec.errors import RacimoError

CONNECT_TIMEOUT_S = 10
SSH_FAILED = 255
"""ssh's own exit code; all others are of the command that ran there."""
_OPTIONS = {
    "BatchMode": "yes", "ConnectTimeout": str(CONNECT_TIMEOUT_S), "ServerAliveInterval": "5", "ServerAliveCountMax": "4"
}  # fmt: skip


class CommandFailed(RacimoError):
    """A command ran on the host and ended with `code`; its standard error is `errors`."""

    def __init__(self, target: str, what: str, code: int, errors: str) -> None:
        last = (errors.strip().splitlines() or [f"exit code {code}"])[-1]
        super().__init__("ssh-failed", f"{target}: {what} failed: {last}")
        self.exit_code = code
        self.errors = errors


class Ssh:
    """Commands on one host. `target`: `user@host` or a name of the configuration; `config`: another file for it."""

    def __init__(self, target: str, config: Path | None = None) -> None:
        if not target or target.startswith("-") or any(character.isspace() for character in target):
            raise RacimoError("invalid-request", f"a host is user@host or a name that ssh knows, not {target!r}")
        self.target = target
        self._config = ["-F", str(config)] if config is not None else []

    @property
    def by_hand(self) -> str:
        """What a person types to see, and to answer, what ssh would ask."""
        return shlex.join(["ssh", *self._config, self.target, "true"])

    def run(self, command: str, what: str, *, stdin: bytes = b"", timeout_s: float) -> str:
        """Runs a command line of the host's shell; its standard output. `what` names it for people.

        `RacimoError` ssh-failed: `CommandFailed` if it ran and failed.
        """
        options = [word for name, value in _OPTIONS.items() for word in ("-o", f"{name}={value}")]
        words = ["ssh", *self._config, "-T", *options, "--", self.target, command]
        try:
            done = subprocess.run(words, input=stdin, capture_output=True, timeout=timeout_s)
        except FileNotFoundError:
            raise RacimoError(
                "ssh-failed", "there is no ssh on this machine", "apt-get install openssh-client"
            ) from None
        except subprocess.TimeoutExpired:
            message = f"{self.target}: {what} took longer than {timeout_s:.0f} s"
            raise RacimoError("ssh-failed", message, self.by_hand) from None
        errors = done.stderr.decode(errors="replace")
        if done.returncode == SSH_FAILED:
            raise self._failed(errors)
        if done.returncode != 0:
            raise CommandFailed(self.target, what, done.returncode, errors)
        return done.stdout.decode(errors="replace")

    def script(self, script: str, what: str, *, timeout_s: float) -> str:
        """Runs a POSIX shell script, whatever the user's shell there is."""
        return self.run("exec /bin/sh -s", what, stdin=script.encode(), timeout_s=timeout_s)

    def _failed(self, errors: str) -> RacimoError:
        lines = [line.strip() for line in errors.splitlines() if line.strip()]
        if "IDENTIFICATION HAS CHANGED" in errors:
            words = "its host key is not the one that ssh knows: another machine, or one set up anew"
        elif "Host key verification failed" in errors or "authenticity of host" in errors:
            words = "its host key is unknown here"
        elif "Permission denied" in errors:
            words = "it asks for a password, or takes none of your keys"
        else:
            words = lines[-1] if lines else "ssh failed without a word"
        return RacimoError("ssh-failed", f"{self.target}: {words}", f"{self.by_hand}   # until it asks nothing")
