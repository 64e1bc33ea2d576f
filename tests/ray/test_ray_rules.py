"""What the Ray part decides without Ray: which relays there are to be, ports, and what it says of itself."""

import socket
import time
from pathlib import Path

import msgspec
import pytest
from ray_stage import free_cluster_port

from racimo.act.ray.accounts import RELAY_KEPT_S, Makings, compare, living_nodes
from racimo.act.ray.place import BLOCK_PORTS, MAX_SESSION_PATH_BYTES, Place, choose_block, read_place, session_folder
from racimo.act.ray.relay import Relay
from racimo.act.ray.words import why_it_ended
from racimo.act.ray_status import NOTE_AFTER_S, RayPort, RayStatus, ray_notes, ray_ports
from racimo.spec.errors import RacimoError
from racimo.spec.home import Home


def listed(ray_id: str, alive: bool = True, **resources: float) -> dict[str, object]:
    return {"NodeID": ray_id, "Alive": alive, "Resources": resources}


def own(name: str) -> dict[str, float]:
    return {f"racimo_node_{name}": 1.0}


def test_each_living_node_gets_one_relay_that_holds_all_its_devices() -> None:
    nodes = living_nodes(
        [
            listed("a" * 56, CPU=2.0, memory=5e9, **own("n1")),
            listed("b" * 56, CPU=8.0, GPU=4.0),
            listed("c" * 56, alive=False, CPU=1.0),
        ]
    )
    assert sorted(nodes) == ["relay/n1/CPU=2", "relay/ray-bbbbbbbbbbbb/CPU=8,GPU=4"]
    changes = compare(nodes, [], {})
    assert [node.relay for node in changes.create] == sorted(nodes)
    assert compare(nodes, nodes, {}).create == compare(nodes, nodes, {}).remove == ()


def test_a_node_service_of_which_ray_does_not_know_yet_that_it_is_dead_is_not_a_second_node() -> None:
    nodes = living_nodes([listed("a" * 56, CPU=2.0, **own("n1")), listed("d" * 56, CPU=2.0, **own("n1"))])
    assert list(nodes) == ["relay/n1/CPU=2"]


def test_a_node_that_came_back_with_other_devices_gets_another_relay() -> None:
    changes = compare(living_nodes([listed("a" * 56, CPU=4.0, **own("n1"))]), ["relay/n1/CPU=2"], {})
    assert changes.remove == ("relay/n1/CPU=2",)
    assert [node.relay for node in changes.create] == ["relay/n1/CPU=4"]


def test_the_relay_of_a_dead_node_is_removed_at_once_or_where_it_may_come_back_after_a_while() -> None:
    relays = ["relay/n1/CPU=2", "relay/ray-bbbbbbbbbbbb/CPU=8"]
    assert compare({}, relays, {}).remove == ("relay/ray-bbbbbbbbbbbb/CPU=8",)
    assert compare({}, relays[:1], {relays[0]: RELAY_KEPT_S + 1}).remove == (relays[0],)


def test_a_relay_that_dies_while_it_is_made_is_made_again_ever_more_slowly() -> None:
    makings, made_at_s = Makings(), []
    for now_s in range(1000, 1200):
        if makings.may("relay/n1/CPU=2", now_s):
            made_at_s.append(now_s - 1000)
    assert made_at_s == [0, 1, 3, 7, 15, 31, 63, 123, 183]
    assert makings.may("relay/n1/CPU=2", 2000)
    assert not makings.may("relay/n1/CPU=2", 2000.5)
    assert makings.may("relay/n1/CPU=2", 2001), "after a long life it begins anew"
    makings.keep([])
    assert makings.may("relay/n1/CPU=2", 2001.5)


@pytest.mark.parametrize(
    ("output", "word"),
    [
        ("RuntimeError: Version mismatch: The cluster was started with:\n Ray: 2.50.0", "another version"),
        ("RPC error: InvalidAuthToken: Authentication token is missing", "token"),
        ("OSError: [Errno 98] Address already in use", "port"),
        ("Traceback (most recent call last):\n  File x\nKeyError: 'session_1'", "exit code 1"),
    ],
)
def test_what_ray_wrote_becomes_one_sentence_without_its_words(output: str, word: str) -> None:
    said = why_it_ended(output, 1, 3.2)
    assert word in said
    assert "\n" not in said
    for theirs in ("Traceback", "session_", "RPC", "Errno"):
        assert theirs not in said


def place(port: int) -> Place:
    return Place(is_head=True, cluster="", head_host="127.0.77.9", head_port=port, own_host="127.0.77.9")


def test_ports_are_kept_and_another_block_is_taken_where_somebody_has_one_of_them(tmp_path: Path) -> None:
    home, port = Home(tmp_path / "h"), free_cluster_port() + 100
    home.node_dir.mkdir(parents=True)
    assert choose_block(home, place(port)) == port + 1
    with socket.create_server(("127.0.0.1", port + 3)):
        assert choose_block(home, place(port)) == port + 1 + BLOCK_PORTS
    assert choose_block(home, place(port)) == port + 1 + BLOCK_PORTS, "it stays where it was"


def test_the_folder_of_sockets_is_short_however_long_the_home(tmp_path: Path) -> None:
    home = Home(tmp_path / ("long" * 20))
    home.node_dir.mkdir(parents=True)
    folder = session_folder(home)
    assert len(str(folder)) <= MAX_SESSION_PATH_BYTES
    assert folder != session_folder(Home(tmp_path)), "another home's is another"


def test_a_home_without_an_address_for_others_has_no_place_in_ray(tmp_path: Path) -> None:
    with pytest.raises(RacimoError, match="no address for other machines"):
        read_place(Home(tmp_path))


def test_a_cluster_on_loopback_has_an_address_that_ray_leaves_as_it_is(tmp_path: Path) -> None:
    Home(tmp_path).config_file.write_text('{"bind": "127.0.0.1:7700", "carrier": "ray"}')
    found = read_place(Home(tmp_path))
    assert (found.cluster, found.address, found.own_host) == ("127.0.0.1:7700", "127.0.0.2:7800", "127.0.0.2")


def test_notes_come_once_ray_has_been_away_for_a_while_and_only_then(tmp_path: Path) -> None:
    home = Home(tmp_path)
    home.node_dir.mkdir()
    assert ray_notes(home) == () == ray_ports(home)
    port = RayPort(port=7800, what="Ray's directory", everywhere=True)
    for since_s, state, relays, notes in [
        (0.0, "down", {}, 0),
        (NOTE_AFTER_S + 1, "down", {}, 1),
        (NOTE_AFTER_S + 1, "up", {"n1": "up", "n2": "starting"}, 0),
        (NOTE_AFTER_S + 1, "up", {"n1": "no agent answers there"}, 1),
    ]:
        status = RayStatus(
            state=state, since_wall_s=time.time() - since_s, reason="it is not installed", ports=(port,), relays=relays
        )
        (home.node_dir / "ray.json").write_bytes(msgspec.json.encode(status))
        assert len(ray_notes(home)) == notes, (state, relays)
    assert ray_ports(home) == (port,)


def test_a_relay_takes_nobody_elses_home_and_overrules_nobody_who_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RACIMO_HOME", str(tmp_path))
    home = Home(tmp_path)
    home.node_dir.mkdir()
    (home.node_dir / "ray-node").write_text("ray-1")
    left = Relay("ray-1").hold("10.0.0.1:7700", "secret:pin", 2)
    assert (left.agent, left.problem) == ("away", "it left the cluster; racimo join there takes it back")
    home.join_file.write_text('{"address": "10.0.0.9:7700", "cluster": "c"}')
    assert "belongs to the cluster at 10.0.0.9:7700" in Relay("ray-1").hold("10.0.0.1:7700", "secret:pin", 2).problem
    home.join_file.unlink()
    home.config_file.write_text("{}")
    (home.node_dir / "ray-node").unlink()
    assert "another cluster's head" in Relay("ray-1").hold("10.0.0.1:7700", "secret:pin", 2).problem
