"""Connections between workers of different machines: who may speak, what arrives where, and what goes first."""

import contextlib
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from racimo.worker.train import courier as courier_module
from racimo.worker.train.buffers import Arena, Layout
from racimo.worker.train.courier import Courier, Dial
from racimo.worker.train.landing import landing_plan
from racimo.worker.train.messages import Again, Contribution, Done, Hello, Holding, Left, Near, Packet, StateOffer
from racimo.worker.train.stream import MAGIC, Channel

HERE = "127.0.0.1"
HELLO = Hello(run="run", attempt=1, generation=3, worker="run/1/1", slot_bytes=4096)


@pytest.fixture
def make() -> Iterator[Callable[..., tuple[Courier, int]]]:
    made: list[Courier] = []

    def listening(key: bytes = b"key") -> tuple[Courier, int]:
        made.append(Courier())
        return made[-1], made[-1].listen(HERE, (0, 0), key)

    yield listening
    for one in made:
        one.close()


def until(condition: Callable[[], Any], *couriers: Courier, timeout_s: float = 10.0) -> Any:
    """Looks again whenever a courier has something to tell."""
    deadline_s = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline_s, "timed out"
        for fd in select.select([one.wake_fd for one in couriers], [], [], 0.05)[0]:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(fd)
    return found


def connect(dialer: Courier, acceptor: Courier, port: int) -> tuple[Channel, Channel]:
    dial = dialer.dial((HERE, port))
    mine = until(lambda: dial.channel, dialer)
    mine.post(HELLO)
    dialer.go()
    theirs = until(lambda: acceptor.take(3, "run/1/1"), acceptor)
    assert theirs.inbox.popleft()[0] == HELLO
    return mine, theirs


def test_who_does_not_know_the_key_gets_no_word_in(make: Callable[..., tuple[Courier, int]]) -> None:
    acceptor, port = make()
    stranger, _ = make(b"another key")
    dial: Dial = stranger.dial((HERE, port))
    until(lambda: dial.failure, stranger)
    assert "does not know the key" in dial.failure
    assert dial.channel is None
    assert acceptor.take(3, "run/1/1") is None


def test_nothing_is_decoded_before_the_proof(
    make: Callable[..., tuple[Courier, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from racimo.worker.train import stream

    decoded: list[bytes] = []
    monkeypatch.setattr(stream, "decode", decoded.append)
    _, port = make()
    for content in (b"GET / HTTP/1.1\r\n\r\n" + bytes(100), MAGIC + bytes(32) + bytes(200)):
        with socket.create_connection((HERE, port), timeout=5) as connection:
            connection.sendall(content)
            with contextlib.suppress(ConnectionResetError):
                while connection.recv(4096):  # its proof of itself, then the end
                    pass
    assert decoded == []


def test_a_payload_arrives_in_the_memory_that_was_planned_for_it(make: Callable[..., tuple[Courier, int]]) -> None:
    dialer, _ = make()
    acceptor, port = make()
    mine, theirs = connect(dialer, acceptor, port)
    first, second = bytearray(5_000_000), bytearray(3)
    theirs.plan = lambda packet, size: ([memoryview(first), memoryview(second)], "came along")
    content = os.urandom(len(first) + len(second))
    mine.post(Done(step=7), [memoryview(content)[:100], memoryview(content)[100:]])
    dialer.go()
    packet, extra = until(lambda: theirs.inbox and theirs.inbox.popleft(), acceptor)
    assert (packet, extra) == (Done(step=7), "came along")
    assert bytes(first + second) == content


def test_a_payload_that_nobody_expects_ends_the_connection(make: Callable[..., tuple[Courier, int]]) -> None:
    dialer, _ = make()
    acceptor, port = make()
    mine, theirs = connect(dialer, acceptor, port)
    mine.post(Left(step=1), [memoryview(bytes(10))])
    dialer.go()
    until(lambda: theirs.gone and mine.gone, acceptor, dialer)
    assert "a payload of 10 bytes" in theirs.why_gone


def test_a_state_streams_in_pieces_and_what_is_urgent_goes_between(
    make: Callable[..., tuple[Courier, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(courier_module, "SLOW_BYTES_PER_S", 20e6)
    dialer, _ = make()
    acceptor, port = make()
    mine, theirs = connect(dialer, acceptor, port)
    content = os.urandom(10_000_000)
    fd = os.memfd_create("state")
    os.write(fd, content)
    mine.offer_state(StateOffer(step=4, head_bytes=1, size_bytes=len(content)), fd)
    mine.post(Again(step=1), slow=True)
    dialer.go()
    mine.post(Near(step=2))
    dialer.go()
    came: list[tuple[Packet, Any]] = []

    def all_came() -> bool:
        while theirs.inbox:
            came.append(theirs.inbox.popleft())
        return len(came) == 3

    until(all_came, acceptor)
    assert [type(packet) for packet, _ in came] == [Near, StateOffer, Again]
    received = came[1][1]
    assert os.pread(received, len(content) + 1, 0) == content
    os.close(received)
    os.close(fd)


def test_an_address_that_nobody_answers_at_is_dialled_until_somebody_does(
    make: Callable[..., tuple[Courier, int]],
) -> None:
    dialer, _ = make()
    with socket.socket() as reserved:
        reserved.bind((HERE, 0))
        port = reserved.getsockname()[1]
    dial = dialer.dial((HERE, port))
    until(lambda: dial.failure, dialer)
    assert "refused" in dial.failure
    late = Courier()
    assert late.listen(HERE, (port, port), b"key") == port
    assert until(lambda: dial.channel, dialer) is not None
    late.close()


def test_once_a_new_address_is_said_nobody_comes_in_at_the_old_one_and_connections_live_on(
    make: Callable[..., tuple[Courier, int]],
) -> None:
    acceptor, old_port = make()
    dialer, _ = make()
    mine, theirs = connect(dialer, acceptor, old_port)
    new_port = acceptor.listen(HERE, (0, 0), b"key")
    acceptor.close_listeners(but_newest=True)
    late = dialer.dial((HERE, old_port))
    until(lambda: late.failure, dialer)
    dialer.give_up(late)
    new = dialer.dial((HERE, new_port))
    until(lambda: new.channel, dialer)
    mine.post(Near(step=7))
    dialer.go()
    until(lambda: theirs.inbox, acceptor)
    acceptor.close_listeners(but_newest=False)
    nowhere = dialer.dial((HERE, new_port))
    until(lambda: nowhere.failure, dialer)
    assert not theirs.gone


def test_a_range_without_a_free_port_is_an_error_that_the_worker_can_say(
    make: Callable[..., tuple[Courier, int]],
) -> None:
    _, port = make()
    with pytest.raises(OSError, match="in use"):
        Courier().listen(HERE, (port, port), b"key")


def test_what_arrives_late_is_not_written_into_the_memory_that_took_over_a_closed_descriptor(
    make: Callable[..., tuple[Courier, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A generation is given up between the courier's `select` and its read; the next one's peers are at hand already,
    and the first descriptor that one of them hands over has the number of the one just closed."""
    dialer, _ = make()
    acceptor, port = make()
    mine, theirs = connect(dialer, acceptor, port)
    layout = Layout([torch.zeros(64)])
    landing = Arena.create(layout, 4)
    theirs.plan = landing_plan(layout, landing, 0, 1)
    selected, given_up = threading.Event(), threading.Event()
    read = theirs.read

    def late() -> None:
        selected.set()
        assert given_up.wait(10)
        read()

    monkeypatch.setattr(theirs, "read", late)
    block = Holding(level=0, index=0, slot=1, leaves=(0,), weight=1.0, weighted_loss=1.0, num_samples=1, used=b"")
    mine.post(Contribution(step=7, holdings=(block,), active=(0,)), [memoryview(bytes(b"x" * 256))])
    dialer.go()
    assert selected.wait(10)
    number = landing.fd
    acceptor.release(theirs)
    landing.close()
    of_a_peer = Arena.create(layout, 4)
    os.dup2(of_a_peer.fd, number)  # whatever lower number it was given
    given_up.set()
    until(lambda: theirs.gone, acceptor)
    assert not of_a_peer.flats(1)[0].any()
    assert acceptor.failed is None
    of_a_peer.close()
