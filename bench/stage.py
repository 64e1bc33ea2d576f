"""The stage of several hosts that the tests play on (`tests/hosts`), for benchmarks."""

import sys

from bench.harness import say
from bench.peers import ROOT, PeerMissing

sys.path.append(str(ROOT / "tests" / "hosts"))

from hosts_cluster import HostsCluster, wait_until
from stage import Host, Hosts, why_not

__all__ = ["Host", "Hosts", "HostsCluster", "require_hosts", "wait_until"]


def require_hosts() -> None:
    """Raises `PeerMissing` where no hosts can be made: a number is never left out in silence."""
    reason = why_not()
    if reason:
        raise PeerMissing(f"several hosts cannot be made here: {reason}")
    say("  hosts: network namespaces on one switch")
