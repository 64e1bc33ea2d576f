"""An sshd of the tests' own, on loopback: its own keys and configuration, nothing of this machine's.

Each "host" is one key: it logs in as the user who runs the tests, into a home folder of its own.
"""

import getpass
import os
import shutil
import socket
import subprocess
from pathlib import Path

from live_cluster import wait_until

SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
CONFIG = """
Port {port}
ListenAddress 127.0.0.1
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/authorized_keys
PidFile none
UsePAM no
StrictModes no
PermitRootLogin yes
PasswordAuthentication no
KbdInteractiveAuthentication no
PrintMotd no
"""
CLIENT = """
Host stranger
  UserKnownHostsFile /dev/null
Host locked
  IdentityFile {folder}/none.key
Host *
  HostName 127.0.0.1
  Port {port}
  User {user}
  UserKnownHostsFile {folder}/known_hosts
  GlobalKnownHostsFile /dev/null
  StrictHostKeyChecking yes
  IdentitiesOnly yes
  IdentityFile {folder}/%n.key
"""


class Sshd:
    def __init__(self, folder: Path) -> None:
        assert SSHD is not None
        self.folder = folder
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self.client_config = folder / "ssh_config"
        self.client_config.write_text(CLIENT.format(port=self.port, user=getpass.getuser(), folder=folder))
        self._make_key("host_key")
        public = (folder / "host_key.pub").read_text()
        (folder / "known_hosts").write_text(f"[127.0.0.1]:{self.port} {public}")
        (folder / "authorized_keys").write_text("")
        (folder / "sshd_config").write_text(CONFIG.format(port=self.port, folder=folder))
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # where it gives its privileges away
        log = folder / "sshd.log"
        self.process = subprocess.Popen([SSHD, "-D", "-E", str(log), "-f", str(folder / "sshd_config")])
        wait_until(lambda: log.exists() and "listening" in log.read_text(), "sshd listens", 10)

    def add_host(self, name: str, **variables: str) -> Path:
        """A host of that name; its home folder. What runs there has these variables as well."""
        home = self.folder / name
        home.mkdir()
        self._make_key(f"{name}.key")
        set_them = " ".join(f"{key}={value}" for key, value in {"HOME": str(home), **variables}.items())
        forced = f'cd {home} && exec env -u RACIMO_HOME {set_them} sh -c \\"$SSH_ORIGINAL_COMMAND\\"'
        with open(self.folder / "authorized_keys", "a") as file:
            file.write(f'command="{forced}" {(self.folder / f"{name}.key.pub").read_text()}')
        return home

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(timeout=10)

    def _make_key(self, name: str) -> None:
        words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / name)]
        subprocess.run(words, check=True, timeout=10)
