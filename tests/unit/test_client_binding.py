"""Addresses that others are to reach: what cannot be is said with what could, before anything is changed."""

import os
import socket
from pathlib import Path

import pytest

from racimo.act.tls import make_certificate
from racimo.client import binding
from racimo.client.binding import check_bind, checked_bind, join_line
from racimo.spec.config import Token, join_address, parse_address, parse_token, read_join
from racimo.spec.errors import RacimoError
from racimo.spec.home import Home

OWN = [("eth0", "10.0.0.7"), ("eth1", "192.168.5.2"), ("lo", "127.0.0.1")]


@pytest.fixture(autouse=True)
def _this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binding, "own_addresses", lambda: OWN)


def refused(bind: str) -> RacimoError:
    with pytest.raises(RacimoError) as caught:
        check_bind(Home(Path("/nowhere")), checked_bind(bind))
    return caught.value


@pytest.mark.parametrize("bind", ["0.0.0.0", "0.0.0.0:7700", "[::]:7700"])
def test_every_interface_at_once_is_refused_with_the_addresses_to_choose_from(bind: str) -> None:
    """An address that others are told must be one that they can dial."""
    error = refused(bind)
    assert error.code == "invalid-request"
    assert "10.0.0.7 (eth0), 192.168.5.2 (eth1)" in error.message and "127.0.0.1" not in error.message
    assert error.hint.startswith("racimo up --bind ")


def test_an_address_of_another_machine_is_refused_with_this_ones_interfaces() -> None:
    error = refused("10.0.0.9")
    assert "10.0.0.9 is no address of this machine (the wrong network interface?)" in error.message
    assert "10.0.0.7 (eth0)" in error.message


def test_a_used_port_names_who_uses_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        error = refused(f"127.0.0.1:{port}")
    assert error.code == "start-failed"
    assert f"port {port} at 127.0.0.1 is used by process {os.getpid()} (" in error.message
    assert error.hint == f"racimo up --bind 127.0.0.1:{port + 10 if port < 65000 else port - 10}"


def test_a_free_port_of_this_machine_is_taken_and_the_port_may_be_left_out() -> None:
    assert checked_bind("127.0.0.1") == "127.0.0.1:7700"
    assert checked_bind("localhost:80") in ("127.0.0.1:80", "[::1]:80")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    check_bind(Home(Path("/nowhere")), f"127.0.0.1:{port}")


@pytest.mark.parametrize(
    "text", ["", ":7700", "a b", "host:port", "host:0", "host:70000", "http://host", "-x", "[::1", "a:1:2"]
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(RacimoError) as caught:
        parse_address(text)
    assert caught.value.code == "invalid-request" and "10.0.0.1:7700" in caught.value.message


@pytest.mark.parametrize("text", ["10.0.0.1:80", "[fd00::2]:7700", "head.example:7701"])
def test_addresses_are_read_as_they_are_written(text: str) -> None:
    assert join_address(*parse_address(text)) == text


def test_ipv6_without_a_port_needs_no_brackets_and_is_quoted_where_a_shell_would_take_them_for_a_pattern(
    tmp_path: Path,
) -> None:
    assert parse_address("fd00::2") == ("fd00::2", 7700)
    home = Home(tmp_path)
    home.token_file.write_text("secret")
    home.certificate_file.write_bytes(make_certificate(["h"])[0])
    home.config_file.write_text('{"bind": "[fd00::2]:7700"}')
    assert "racimo join '[fd00::2]:7700' --token-file -" in join_line(home)


@pytest.mark.parametrize("text", ["", "two words", "secret:", "secret:abc", f"secret:{'g' * 64}", ":" + "0" * 64])
def test_what_is_no_token_is_refused_without_showing_it(text: str) -> None:
    with pytest.raises(RacimoError) as caught:
        parse_token(text)
    assert caught.value.code == "unauthorized" and "secret" not in str(caught.value)


def test_a_token_is_a_secret_perhaps_with_a_pin() -> None:
    assert parse_token("abc\n") == Token("abc")
    assert str(parse_token(f"abc:{'0' * 64}")) == f"abc:{'0' * 64}"


def test_a_home_that_is_a_file_is_an_error_with_its_path(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for home in (Home(tmp_path / "file"), Home(tmp_path / "file" / "below")):
        with pytest.raises(RacimoError, match=r"cannot read .*join\.json: Not a directory"):
            read_join(home)
