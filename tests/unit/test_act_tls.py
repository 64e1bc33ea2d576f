"""Certificates that are known by their pin."""

import asyncio
import socket
import ssl
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from racimo.act.tls import (
    client_context,
    ensure_certificate,
    fetch_certificate,
    make_certificate,
    pin_of,
    server_context,
)
from racimo.spec.errors import RacimoError

NAMES = ("127.0.0.1", "localhost", "a host that is no name")


async def _serve_once(folder: Path, ask: Callable[[str], object], wrapped: bool = True) -> object:
    context = server_context(folder / "cluster.pem", folder / "cluster.key") if wrapped else None

    async def close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 welcome\n")
        writer.close()

    server = await asyncio.start_server(close, "127.0.0.1", 0, ssl=context)
    async with server:
        return await asyncio.to_thread(ask, f"127.0.0.1:{server.sockets[0].getsockname()[1]}")


def test_a_certificate_is_made_once_and_its_key_is_private(tmp_path: Path) -> None:
    pem = ensure_certificate(tmp_path / "cluster.pem", tmp_path / "control" / "cluster.key", NAMES)
    assert ensure_certificate(tmp_path / "cluster.pem", tmp_path / "control" / "cluster.key", ("other",)) == pem
    assert stat.S_IMODE((tmp_path / "control" / "cluster.key").stat().st_mode) == 0o600
    assert len(pin_of(pem)) == 64
    (tmp_path / "control" / "cluster.key").unlink()
    assert ensure_certificate(tmp_path / "cluster.pem", tmp_path / "control" / "cluster.key", NAMES) != pem


def test_the_pinned_certificate_is_fetched_and_another_is_not(tmp_path: Path) -> None:
    pem = ensure_certificate(tmp_path / "cluster.pem", tmp_path / "cluster.key", NAMES)
    assert asyncio.run(_serve_once(tmp_path, lambda address: fetch_certificate(address, pin_of(pem)))) == pem
    other = pin_of(make_certificate(NAMES)[0])
    with pytest.raises(RacimoError) as caught:
        asyncio.run(_serve_once(tmp_path, lambda address: fetch_certificate(address, other)))
    assert caught.value.code == "certificate-mismatch"


def test_who_dials_trusts_that_certificate_alone(tmp_path: Path) -> None:
    pem = ensure_certificate(tmp_path / "cluster.pem", tmp_path / "cluster.key", NAMES)

    async def dial(trusted: bytes) -> None:
        server = await asyncio.start_server(
            lambda reader, writer: writer.close(), "127.0.0.1", 0,
            ssl=server_context(tmp_path / "cluster.pem", tmp_path / "cluster.key"),
        )  # fmt: skip
        async with server:
            port = server.sockets[0].getsockname()[1]
            _, writer = await asyncio.open_connection(
                "127.0.0.1", port, ssl=client_context(trusted), server_hostname=""
            )
            writer.transport.abort()

    asyncio.run(dial(pem))
    with pytest.raises(ssl.SSLCertVerificationError):
        asyncio.run(dial(make_certificate(NAMES)[0]))


def test_who_answers_without_tls_or_not_at_all_is_unreachable(tmp_path: Path) -> None:
    ensure_certificate(tmp_path / "cluster.pem", tmp_path / "cluster.key", NAMES)
    with pytest.raises(RacimoError) as caught:
        asyncio.run(_serve_once(tmp_path, lambda address: fetch_certificate(address, "0" * 64), wrapped=False))
    assert caught.value.code == "unreachable" and "TLS" in caught.value.message
    with pytest.raises(RacimoError) as caught:
        fetch_certificate("127.0.0.1:1", "0" * 64)
    assert caught.value.code == "unreachable" and "127.0.0.1:1" in caught.value.message


def test_who_takes_the_connection_and_says_nothing_is_told_from_who_does_not_take_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as tarpit, pytest.raises(RacimoError) as caught:
        fetch_certificate(f"127.0.0.1:{tarpit.getsockname()[1]}", "0" * 64, 0.1)
    assert caught.value.code == "unreachable" and "takes connections" in caught.value.message
    assert "says nothing (waited up to 0.1 s)" in caught.value.message


def test_a_name_without_an_address_is_named() -> None:
    with pytest.raises(RacimoError) as caught:
        fetch_certificate("no-such-host.invalid:7700", "0" * 64)
    assert "no-such-host.invalid has no address here" in caught.value.message and "getent" in caught.value.hint


def test_what_is_no_certificate_has_no_pin() -> None:
    with pytest.raises(RacimoError) as caught:
        pin_of(b"nonsense")
    assert caught.value.code == "certificate-mismatch"
