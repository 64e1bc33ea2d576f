"""At the head: keeps a relay on every node of the cluster's Ray. `python -m racimo.act.ray.driver --home DIR`.

A process of its own, because a driver ends with the part of Ray it is connected to; the relays, which are detached,
do not. Says how they are as a line of JSON on its standard output, at each change and at least every `SAY_EVERY_S`.
"""

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import ray
from ray.util import list_named_actors
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from racimo.act.ray import accounts
from racimo.act.ray.place import NODE_RESOURCE, Place, read_place, session_folder
from racimo.act.ray.relay import Relay, RelayState
from racimo.act.tls import pin_of
from racimo.spec.config import Token, parse_token
from racimo.spec.home import Home

NAMESPACE = "racimo"
LOOK_S = 1.0
"""Between looks at Ray's list of nodes, which it does not offer to wait for."""
PING_EVERY_S = 10.0
PING_UNSETTLED_S = 2.0
"""Where no agent answers yet."""
SLOW_S = 20.0
"""An unanswered call is a fault after this long: a relay that is made anew needs some 15 s, most of it Ray's notice."""
SAY_EVERY_S = 15.0
RESTARTS_WITHOUT_END = -1


class _Held:
    """A relay as this driver knows it: at most one call to it is under way."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor
        self.call: Any = None
        self.called_s = self.due_s = 0.0
        self.state: RelayState | None = None
        self.problem = "starting"
        self.unseen_since_s: float | None = None


class Driver:
    def __init__(self, home: Home, place: Place) -> None:
        self._place = place
        token = parse_token(home.token_file.read_text())
        pin = token.pin or pin_of(home.certificate_file.read_bytes())
        self._token = str(Token(token.secret, pin))
        self._held: dict[str, _Held] = {}
        self._makings = accounts.Makings()
        self._problems: dict[str, str] = {}
        """The newest word on each relay, also of one that died while it was made."""

    def look(self) -> dict[str, str]:
        """One round: makes what is missing, removes what is too much, asks those whose turn it is."""
        now_s = time.monotonic()
        nodes = accounts.living_nodes(ray.nodes())  # type: ignore[no-untyped-call]
        existing = set(list_named_actors())
        for relay in existing:
            held = self._held.get(relay) or self._held.setdefault(relay, _Held(ray.get_actor(relay)))
            held.unseen_since_s = None if relay in nodes else held.unseen_since_s or now_s
        unseen_s = {
            relay: now_s - held.unseen_since_s for relay, held in self._held.items() if held.unseen_since_s is not None
        }
        changes = accounts.compare(nodes, existing, unseen_s)
        for relay in changes.remove:
            ray.kill(self._held.pop(relay).actor)
        for relay in self._held.keys() - existing:  # it died while it was made, or somebody else removed it
            held = self._held.pop(relay)
            self._note(held, now_s)
            self._problems[relay] = held.problem
        for node in changes.create:
            if self._makings.may(node.relay, now_s):
                self._held[node.relay] = _Held(self._create(node))
        said = {}
        for relay, node in nodes.items():
            if relay in self._held:
                self._ask(self._held[relay], node, now_s)
                self._problems[relay] = self._held[relay].problem
            said[node.name] = self._problems.get(relay) or "up"
        self._makings.keep(nodes)
        self._problems = {relay: self._problems[relay] for relay in nodes if relay in self._problems}
        return said

    def _create(self, node: accounts.RayNode) -> Any:
        amounts = dict(node.held)
        if node.own:
            # Follows the node's part of Ray wherever that is started again.
            where: Any = None
            amounts[NODE_RESOURCE + node.own] = 1e-3
        else:
            where = NodeAffinitySchedulingStrategy(node.ray_id, soft=False)
        options = {
            "name": node.relay,
            "namespace": NAMESPACE,
            "lifetime": "detached",
            "get_if_exists": True,
            "max_restarts": RESTARTS_WITHOUT_END,
            "num_cpus": amounts.pop("CPU", 0),
            "num_gpus": amounts.pop("GPU", 0),
            "resources": amounts,
        }
        if where is not None:
            options["scheduling_strategy"] = where
        return ray.remote(Relay).options(**options).remote(node.name)

    def _ask(self, held: _Held, node: accounts.RayNode, now_s: float) -> None:
        """Notes the answer to the call under way, or makes the next one. Never a second call: those queued to an actor
        that cannot be reached only slow its return."""
        if held.call is not None:
            self._note(held, now_s)
            if held.call is None and held.state is not None:
                held.problem = _problem(held.state, node)
            if held.call is not None:
                return
        if now_s < held.due_s and held.state is not None:
            return
        settled = held.state is not None and held.state.agent == "up"
        held.called_s = now_s
        held.due_s = now_s + (PING_EVERY_S if settled else PING_UNSETTLED_S)
        if not node.own and held.state is not None and held.state.agent == "away":
            amounts = dict(node.held)
            slots = None if amounts.get("GPU") else int(amounts.get("CPU", 0))
            held.call = held.actor.hold.remote(self._place.cluster, self._token, slots)
        else:
            held.call = held.actor.ping.remote()

    def _note(self, held: _Held, now_s: float) -> None:
        """The outcome of the call under way, if it is there."""
        if held.call is None:
            return
        if not ray.wait([held.call], timeout=0)[0]:
            if now_s > held.called_s + SLOW_S:
                held.problem = "its devices are not free in Ray, or it does not answer"
            return
        try:
            held.state = ray.get(held.call)
        except ray.exceptions.RayActorError as error:
            missing = "No module named" in str(error)
            held.state, held.problem = None, "Racimo is not installed there" if missing else "starting"
        held.call = None


def _problem(state: RelayState, node: accounts.RayNode) -> str:
    if state.agent == "up":
        return ""
    return state.problem or ("no agent answers there" if node.own else "its agent is being started")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m racimo.act.ray.driver", description=__doc__)
    parser.add_argument("--home", type=Path, required=True)
    home = Home(parser.parse_args().home.absolute())
    line = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # Ray prints, too
    place = read_place(home)
    ray.init(
        address=place.address,
        namespace=NAMESPACE,
        log_to_driver=False,
        configure_logging=False,
        include_dashboard=False,
        _node_ip_address=place.own_host,
        _temp_dir=os.fspath(session_folder(home)),
    )
    driver = Driver(home, place)
    said: dict[str, str] | None = None
    said_at_s = 0.0
    while True:
        relays = driver.look()
        now_s = time.monotonic()
        if relays != said or now_s - said_at_s >= SAY_EVERY_S:
            line.write(msgspec.json.encode(accounts.Said(relays=relays)) + b"\n")
            said, said_at_s = relays, now_s
        time.sleep(LOOK_S)


if __name__ == "__main__":
    sys.exit(main())
