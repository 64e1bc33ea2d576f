"""The stage itself: what the other tests here rely on."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import stage
from stage import Host, Hosts

PORT = 5000


@pytest.fixture(scope="module")
def pair() -> Iterator[Hosts]:
    with Hosts(2) as hosts:
        yield hosts


def listen(host: Host) -> socket.socket:
    with host.inside():
        listener = socket.create_server((host.address, 0))
    listener.settimeout(10)
    return listener


def connected(client: Host, server: Host) -> tuple[socket.socket, socket.socket]:
    with listen(server) as listener:
        with client.inside():
            near = socket.create_connection(listener.getsockname(), timeout=5)
        far, _ = listener.accept()
    far.settimeout(5)
    return near, far


def passes(near: socket.socket, far: socket.socket, wait_s: float) -> bool:
    """Whether bytes sent on one side arrive on the other within `wait_s`."""
    far.settimeout(wait_s)
    near.sendall(b"x")
    try:
        return far.recv(100).startswith(b"x")
    except TimeoutError:
        return False


def test_hosts_have_names_and_addresses_of_their_own_and_reach_each_other(pair: Hosts) -> None:
    for number, host in enumerate(pair, 1):
        program = "import socket as s; print(s.gethostname(), s.gethostbyname('h1'), s.gethostbyname(s.gethostname()))"
        told = host.run([sys.executable, "-S", "-c", program])
        assert told.stdout.split() == [f"h{number}", pair[0].address, host.address], told
    near, far = connected(pair[0], pair[1])
    with near, far:
        assert near.getsockname()[0] == pair[0].address
        assert passes(near, far, 5)
    with pytest.raises(OSError, match=r"assign|refused"), socket.create_server((pair[0].address, 0)):
        pass  # the address is the host's, not this machine's


def test_a_cut_cable_is_silence_and_no_reset_and_heals(pair: Hosts) -> None:
    near, far = connected(pair[0], pair[1])
    with near, far:
        assert passes(near, far, 5)
        pair[1].cut()
        assert not passes(near, far, 0.4), "bytes came through a cut cable"
        assert not passes(far, near, 0.1), "bytes came through a cut cable"
        with pair[0].inside(), pytest.raises(TimeoutError):
            socket.create_connection((pair[1].address, PORT), timeout=0.3)
        pair[1].heal()
        assert passes(near, far, 10), "the connection is dead after a short cut"


@pytest.mark.parametrize("direction", ["in", "out"])
def test_a_one_way_cut_loses_one_direction_alone(pair: Hosts, direction: str) -> None:
    with pair[0].inside():
        zero = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        zero.bind((pair[0].address, 0))
    with pair[1].inside():
        one = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        one.bind((pair[1].address, 0))
    with zero, one:
        zero.settimeout(0.2)
        one.settimeout(0.2)

        def arrives(sender: socket.socket, receiver: socket.socket, tries: int = 15) -> bool:
            """Addresses are asked for once a second, so after a cut the first datagrams may be lost."""
            for _ in range(tries):
                sender.sendto(b"x", receiver.getsockname())
                try:
                    return receiver.recv(10) == b"x"
                except TimeoutError:
                    continue
            return False

        assert arrives(zero, one)
        assert arrives(one, zero)
        pair[1].cut(direction)  # type: ignore[arg-type]
        try:
            assert arrives(zero, one, 2 if direction == "in" else 15) == (direction == "out")
            assert arrives(one, zero, 2 if direction == "out" else 15) == (direction == "in")
        finally:
            pair[1].heal()
        assert arrives(zero, one)
        assert arrives(one, zero)


def test_a_cable_has_its_rate_within_a_fifth(pair: Hosts) -> None:
    pair[0].set_rate("100mbit")
    try:
        for sender, receiver in ((pair[0], pair[1]), (pair[1], pair[0])):
            assert 80e6 < bits_per_s(sender, receiver, 6_000_000) < 120e6
    finally:
        pair[0].set_rate(stage.GBIT)


def bits_per_s(sender: Host, receiver: Host, size: int) -> float:
    near, far = connected(sender, receiver)
    with near, far:
        thread = threading.Thread(target=near.sendall, args=(bytes(size),))
        thread.start()
        got, skipped, began_s = 0, 0, 0.0
        while got < size:
            got += len(far.recv(2**18))
            if not skipped and got > size / 10:  # the full bucket at the start is no rate
                skipped, began_s = got, time.monotonic()
        thread.join()
        return 8 * (got - skipped) / (time.monotonic() - began_s)


def test_a_delay_is_kept_and_large_segments_pass(make_hosts: Callable[..., Hosts]) -> None:
    hosts = make_hosts(2, delay_s={1: 0.02})
    near, far = connected(hosts[0], hosts[1])
    with near, far:
        near.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        trips = []
        for _ in range(5):
            began_s = time.monotonic()
            assert passes(near, far, 5)
            assert passes(far, near, 5)
            trips.append(time.monotonic() - began_s)
        assert 0.04 <= min(trips) < 0.06
    assert bits_per_s(hosts[0], hosts[1], 4_000_000) > 20e6


def test_a_host_that_is_switched_off_has_no_process_left(make_hosts: Callable[..., Hosts]) -> None:
    (host,) = make_hosts(1)
    sleepers = [host.popen(["sh", "-c", "sleep 60 & sleep 60"], start_new_session=True) for _ in range(3)]
    while len(host.pids()) < 9:
        time.sleep(0.01)
    host.power_off()
    assert host.pids() == []
    assert {sleeper.wait(5) for sleeper in sleepers} == {-signal.SIGKILL}


def test_what_a_killed_stage_left_is_cleared_by_the_next(tmp_path: Path) -> None:
    program = "import sys; sys.path.insert(0, sys.argv[1]); from stage import Hosts\n"
    program += "h = Hosts(1); h[0].popen(['sleep', '60'], stdout=-3); print(h.number, flush=True); sys.stdin.read()"
    here = str(Path(__file__).parent)
    other = subprocess.Popen(
        [sys.executable, "-c", program, here],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(tmp_path)},
    )
    assert other.stdout is not None
    number = int(other.stdout.readline())
    assert stage.NAMESPACES.joinpath(f"racimo-{number}-h1").exists()
    other.kill()
    other.communicate()
    made: list[Hosts] = []
    try:
        while not made or made[-1].number < number:
            made.append(Hosts(0))  # the lowest free number first, so sooner or later this one
        assert not stage.NAMESPACES.joinpath(f"racimo-{number}-h1").exists()
    finally:
        for hosts in made:
            hosts.close()
    assert list(stage.NAMESPACES.glob(f"racimo-{number}-*")) == []
