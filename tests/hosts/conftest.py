"""The stage that these tests play on; where it cannot be built they are skipped, with the reason."""

from collections.abc import Callable, Iterator

import pytest
import stage
from hosts_cluster import HostsCluster
from stage import Hosts


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = [item for item in items if item.path.parent.name == "hosts"]
    reason = stage.why_not() if here else ""
    if reason:
        for item in here:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def make_hosts() -> Iterator[Callable[..., Hosts]]:
    """`make_hosts(3)`: hosts that are gone with the test, whatever happens."""
    made: list[Hosts] = []

    def make(count: int, **kwargs: object) -> Hosts:
        made.append(Hosts(count, **kwargs))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for hosts in made:
        hosts.close()


@pytest.fixture(scope="session")
def cluster() -> Iterator[HostsCluster]:
    """Three hosts with one slot each, for all tests that leave them as they were."""
    with Hosts(3) as hosts:
        live = HostsCluster(hosts, 1).start()
        yield live
        live.down()
        assert [host.pids() for host in list(hosts)[:3]] == [[], [], []], "processes are left after `racimo down`"
