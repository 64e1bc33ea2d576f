"""Where a cluster keeps its things: the layout of `$RACIMO_HOME`. Paths only; nothing here touches the disk."""

import hashlib
import os
from pathlib import Path

import msgspec

MAX_SOCKET_PATH_BYTES = 100  # sun_path holds 108


class Home(msgspec.Struct, frozen=True):
    """The layout below one root folder (0700); everything in it belongs to one cluster on one machine."""

    root: Path

    @staticmethod
    def default() -> "Home":
        return Home(Path(os.environ.get("RACIMO_HOME") or Path.home() / ".racimo").absolute())

    # Whole cluster
    @property
    def cluster_file(self) -> Path:
        """JSON: cluster id, address, version; written by the control process once it takes requests (0600)."""
        return self.root / "cluster.json"

    @property
    def config_file(self) -> Path:
        """JSON: slots and price, as `racimo up` was told (0600)."""
        return self.root / "config.json"

    @property
    def token_file(self) -> Path:
        return self.root / "token"

    @property
    def supervisor_lock(self) -> Path:
        return self.root / "supervisor.lock"

    @property
    def processes_dir(self) -> Path:
        """One `NAME.json` per service process: pid, its start time in clock ticks, role."""
        return self.root / "processes"

    @property
    def service_logs_dir(self) -> Path:
        return self.root / "logs"

    # Clusters of several machines
    @property
    def join_file(self) -> Path:
        """JSON on a machine that joined: the head's address, the cluster's id, this machine's own address (0600)."""
        return self.root / "join.json"

    @property
    def link_file(self) -> Path:
        """JSON (`spec.config.LinkState`): how the joined machine's agent stands with control, for people."""
        return self.root / "node" / "link.json"

    @property
    def certificate_file(self) -> Path:
        """PEM of the cluster's certificate: the head's own, or the one that a joined machine has pinned."""
        return self.root / "cluster.pem"

    @property
    def certificate_key_file(self) -> Path:
        """The head's private key (0600)."""
        return self.root / "control" / "cluster.key"

    @property
    def mirrored_logs_dir(self) -> Path:
        """The last MB of each worker's logs on other nodes, as `RUN/ATTEMPT/INDEX/{out,err}.log`."""
        return self.root / "control" / "logs"

    @property
    def merged_reports_dir(self) -> Path:
        """What runs on several nodes reported, as `RUN.jsonl`."""
        return self.root / "control" / "reports"

    # Control process
    @property
    def journal_file(self) -> Path:
        return self.root / "control" / "journal.db"

    @property
    def restored_file(self) -> Path:
        """There if this home was made from a backup: what the backup said of itself."""
        return self.root / "control" / "restored.json"

    @property
    def secrets_file(self) -> Path:
        return self.root / "control" / "secrets.json"

    @property
    def blobs_dir(self) -> Path:
        return self.root / "control" / "blobs"

    @property
    def snapshots_dir(self) -> Path:
        return self.root / "control" / "snapshots"

    # Agent
    @property
    def node_dir(self) -> Path:
        return self.root / "node"

    @property
    def agent_socket(self) -> Path:
        return self._socket("agent.sock")

    def zygote_socket(self, name: str) -> Path:
        return self._socket(f"zygote-{name}.sock")

    def worker_dir(self, worker: str) -> Path:
        """`worker` is `run/attempt/index`."""
        return self.node_dir / "workers" / worker

    def attempt_files_dir(self, run: str, attempt: int) -> Path:
        """The private folder into which an attempt's snapshot is unpacked; its workers' working directory."""
        return self.node_dir / "files" / run / str(attempt)

    def output_dir(self, run: str) -> Path:
        return self.root / "outputs" / run

    def _socket(self, name: str) -> Path:
        path = self.node_dir / name
        if len(os.fsencode(path)) <= MAX_SOCKET_PATH_BYTES:
            return path
        digest = hashlib.sha256(os.fsencode(self.root)).hexdigest()[:16]
        return Path(f"/tmp/racimo-{os.getuid()}-{digest}") / name
