"""Agents among themselves: who may speak, contents passed on (also while they arrive), and ways measured."""

import asyncio
import errno
import os
import socket
import sys
import time
from pathlib import Path

import msgspec
import pytest
from peer_stage import BIG, Host, hosts, name_of, play

from racimo.agent import arrivals as arriving
from racimo.agent import peer_server
from racimo.agent.arrivals import PIECE_BYTES
from racimo.agent.blobs import Draft
from racimo.agent.environments import Environment, Environments
from racimo.agent.find_modules import missing_modules
from racimo.agent.neighbours import Neighbours
from racimo.agent.protocol import (
    FetchBlobs,
    FetchReply,
    FindModules,
    ModulesReply,
    ProbePeer,
    ProbeReply,
    PutBlob,
    PutBlobPart,
)
from racimo.spec.errors import RacimoError


def test_contents_are_fetched_from_another_agent_large_and_small(tmp_path: Path) -> None:
    async def scene() -> None:
        async with hosts(tmp_path, 2) as (one, two):
            contents = [os.urandom(BIG), b"", b"small", os.urandom(PIECE_BYTES)]
            for content in contents:
                one.blobs.put(name_of(content), content)
            assert await two.fetch(one, *contents) == FetchReply()
            assert all(two.has(content) for content in contents)

    play(scene)


def test_a_chain_passes_a_content_on_while_it_still_arrives(tmp_path: Path) -> None:
    """The last of the chain has the first pieces before the first of the chain has the last one."""

    async def scene() -> None:
        async with hosts(tmp_path, 3) as (one, two, three):
            content = os.urandom(BIG)
            waiting = [asyncio.create_task(two.fetch(one, content)), asyncio.create_task(three.fetch(two, content))]
            parts = [content[at : at + PIECE_BYTES] for at in range(0, BIG, PIECE_BYTES)]

            async def put(number: int) -> None:
                part = PutBlobPart(
                    sha256=name_of(content), offset=number * PIECE_BYTES, total_bytes=BIG, content=parts[number]
                )
                await one.ask(part)

            for number in range(len(parts) - 1):
                await put(number)
            drafts = three.home.node_dir / "blobs"
            while sum(path.stat().st_size for path in drafts.glob(".draft-*")) < 4 * PIECE_BYTES:
                await asyncio.sleep(0.002)
            assert not one.has(content)
            await put(len(parts) - 1)
            assert await asyncio.gather(*waiting) == [FetchReply(), FetchReply()]
            assert three.has(content)

    play(scene)


def test_what_the_source_does_not_get_either_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arriving, "QUIET_S", 0.05)

    async def scene() -> None:
        async with hosts(tmp_path, 2) as (one, two):
            one.blobs.put(name_of(b"there"), b"there")
            absent = [f"nowhere {number}".encode() for number in range(200)]
            began_s = time.monotonic()
            reply = await two.fetch(one, *absent, b"there")
            assert set(reply.missing) == {name_of(content) for content in absent}
            assert two.has(b"there")
            assert time.monotonic() - began_s < 200 * 0.05, "not every single one of them is waited for"

    play(scene)


def test_a_source_that_goes_away_leaves_what_came_whole_and_names_itself(tmp_path: Path) -> None:
    async def scene() -> None:
        async with hosts(tmp_path, 2) as (one, two):
            content = os.urandom(BIG)
            one.blobs.put(name_of(b"first"), b"first")
            waiting = asyncio.create_task(two.fetch(one, b"first", content))
            await one.ask(
                PutBlobPart(sha256=name_of(content), offset=0, total_bytes=BIG, content=content[:PIECE_BYTES])
            )
            while not two.has(b"first"):
                await asyncio.sleep(0.002)
            await one.neighbours.close()
            reply = await waiting
            assert reply.missing == (name_of(content),)
            assert two.has(b"first") and not two.has(content)
            assert not list((two.home.node_dir / "blobs").glob(".*")), "no half content stays"
            assert "h1" in (await two.fetch(one, content)).problem

    play(scene)


def test_a_content_that_is_not_what_its_name_says_is_not_kept(tmp_path: Path) -> None:
    async def scene() -> None:
        async with hosts(tmp_path, 2) as (one, two):
            content = os.urandom(BIG)
            one.blobs.path(name_of(content)).write_bytes(content[:-1] + b"?")
            reply = await two.fetch(one, content)
            assert reply.missing == (name_of(content),) and "SHA-256" in reply.problem
            assert not two.has(content)

    play(scene)


def test_pieces_out_of_order_end_the_arrival(tmp_path: Path) -> None:
    async def scene() -> None:
        async with hosts(tmp_path, 1) as (one,):
            content = os.urandom(100)
            for offset, code in ((0, ""), (60, "invalid-request"), (50, "invalid-request")):
                part = PutBlobPart(
                    sha256=name_of(content), offset=offset, total_bytes=100, content=content[offset : offset + 50]
                )
                if not code:
                    await one.ask(part)
                    continue
                with pytest.raises(RacimoError) as caught:
                    await one.ask(part)
                assert caught.value.code == code
            with pytest.raises(RacimoError):
                await one.ask(PutBlobPart(sha256="../../etc", offset=0, total_bytes=1, content=b"x"))

    play(scene)


def test_a_full_disk_is_named_with_its_host_and_nothing_half_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(draft: Draft, piece: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Draft, "write", full)

    async def scene() -> None:
        async with hosts(tmp_path, 1) as (one,):
            content = os.urandom(100)
            part = PutBlobPart(sha256=name_of(content), offset=0, total_bytes=300_000_000, content=content)
            for message in (part, PutBlob(sha256=name_of(content), content=content)):
                with pytest.raises(RacimoError) as caught:
                    await one.ask(message)
                assert caught.value.code == "disk-full" and socket.gethostname() in caught.value.message
            assert not list((one.home.node_dir / "blobs").iterdir())

    play(scene)


def test_an_agent_of_another_cluster_is_refused(tmp_path: Path) -> None:
    async def scene() -> None:
        async with hosts(tmp_path, 1) as (one,):
            one.blobs.put(name_of(b"private"), b"private")
            stranger = Host(tmp_path / "stranger", "another-secret")
            reply = await stranger.fetch(one, b"private")
            assert reply.missing and "another cluster's token" in reply.problem
            assert not stranger.has(b"private")

    play(scene)


def test_only_contents_can_be_asked_for_and_no_other_file(tmp_path: Path) -> None:
    async def scene() -> None:
        async with hosts(tmp_path, 2) as (one, two):
            reply = await two.ask(FetchBlobs(source=one.peer, sha256s=("../../token", str(one.home.token_file))))
            assert len(reply.missing) == 2

    play(scene)


def test_another_machine_at_the_same_address_gets_no_proof(tmp_path: Path) -> None:
    """The pin that control gave out is compared before anything is said."""

    async def scene() -> None:
        async with hosts(tmp_path, 2) as (one, two):
            two.peer = msgspec.structs.replace(one.peer, pin="0" * 64)
            reply = await one.ask(ProbePeer(peer=two.peer))
            assert "answers another than the agent" in reply.problem

    play(scene)


def test_a_way_is_measured_and_one_that_is_closed_is_named(tmp_path: Path) -> None:
    async def scene() -> None:
        async with hosts(tmp_path, 2) as (one, two):
            reply = await one.ask(ProbePeer(peer=two.peer, round_trips=5, size_bytes=2_000_000))
            assert isinstance(reply, ProbeReply) and not reply.problem
            assert 0 < reply.latency_s < 1 and reply.bandwidth_bytes_per_s > 1e6
            await two.neighbours.close()
            closed = await one.ask(ProbePeer(peer=two.peer))
            assert f"127.0.0.1:{two.peer.port}" in closed.problem and "h2" in closed.problem

    play(scene)


def test_an_agent_keeps_its_port_and_certificate_across_restarts(tmp_path: Path) -> None:
    async def scene() -> None:
        async with hosts(tmp_path, 2) as (one, _):
            before = one.peer
            await one.neighbours.close()
            again = Neighbours(one.home, one.blobs, Environments(tmp_path / "envs", "h1"))
            serving = await again.serve_at("127.0.0.1")
            assert (serving.port, serving.pin) == (before.port, before.pin)
            assert await again.serve_at("127.0.0.1") is serving
            await again.close()

    play(scene)


def test_an_address_of_another_machine_leaves_the_node_without_a_port(tmp_path: Path) -> None:
    async def scene() -> None:
        host = Host(tmp_path / "h")
        serving = await host.neighbours.serve_at("192.0.2.77")
        assert serving.port == 0
        await host.neighbours.close()

    play(scene)


def test_beyond_the_bound_another_agent_is_told_to_come_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_server, "MAX_PEERS", 0)

    async def scene() -> None:
        async with hosts(tmp_path, 2) as (one, two):
            reply = await one.fetch(two, b"x")
            assert "being served" in reply.problem

    play(scene)


def test_modules_are_looked_up_without_being_imported(tmp_path: Path) -> None:
    async def scene() -> None:
        async with hosts(tmp_path, 1) as (one,):
            reply = await one.ask(FindModules(modules=("json", "torch", "no_such_module_here", "not a name")))
            assert reply == ModulesReply(missing=("no_such_module_here",))

    play(scene)


def test_an_environments_own_interpreter_is_asked(tmp_path: Path) -> None:
    """It may have what the cluster's has not; and one that cannot be started says so."""

    async def scene() -> None:
        (tmp_path / "only_there.py").write_text("raise SystemExit('it was imported')")
        python = tmp_path / "python"
        python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
        python.chmod(0o755)
        asked = ("only_there", "json", "no_such_module_here")
        assert await missing_modules(Environment("abc", python), asked) == ("no_such_module_here",)
        python.write_text("#!/bin/sh\nexit 3\n")
        with pytest.raises(RacimoError, match="exit 3"):
            await missing_modules(Environment("abc", python), asked)

    play(scene)
