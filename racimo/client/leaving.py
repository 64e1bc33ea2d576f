"""Leaving a cluster: what `racimo down` does on a machine that joined one."""

import socket
import time

from racimo.client.discovery import Endpoint, local_endpoint, supervisor_alive
from racimo.client.ending import end_services, service_records
from racimo.client.forgetting import forget
from racimo.client.joined_home import forget_cluster
from racimo.client.joining import link_state
from racimo.client.probing import ask
from racimo.client.say import Say
from racimo.client.waiting import own_id, own_node
from racimo.control.views import DrainRequest, NodeView
from racimo.spec.config import read_join
from racimo.spec.errors import RacimoError
from racimo.spec.home import Home
from racimo.state.nouns import Node

DRAIN_S = 20.0
"""How long what only its user understands may go on before it is stopped."""
WAIT_MOST_S = 60.0
POLL_S = 0.2


def leave(home: Home, *, now: bool, say: Say) -> bool:
    """What runs here moves to other nodes or ends, then this machine's services end and the head forgets the node.
    `now`: without waiting for the work. False if nothing was running; the home has left its cluster all the same."""
    joined = read_join(home)
    assert joined is not None
    running = supervisor_alive(home) or bool(service_records(home))
    endpoint = local_endpoint(home)
    own, why_not = _node_here(home, endpoint)
    elsewhere = own is not None and _is_elsewhere(home, own)
    node = None if own is None or elsewhere else own.id
    name = own_id(home) or "NODE"
    if elsewhere:
        assert own is not None
        say(f"node {own.id} is on host {own.host} and stays in the cluster: this home is a copy of that one's")
    elif running and not now and endpoint is not None and node is not None:
        try:
            _drain(endpoint, node, say)
        except KeyboardInterrupt:
            say(f"node {node} gets no more work: racimo down goes on, racimo drain {node} --undo takes it back")
            raise
    elif running and not now:
        say(f"the head cannot be asked ({why_not or f'{joined.address} does not know this node'}): ending at once")
    if running:
        end_services(home)
    left = elsewhere or (endpoint is not None and not why_not and (node is None or forget(endpoint, node, say)))
    if not left:
        say(f"once the head of that cluster answers, type there: racimo nodes forget {name} --confirm-dead")
    forget_cluster(home)
    return running


def _node_here(home: Home, endpoint: Endpoint | None) -> tuple[Node | None, str]:
    """This home's node in the cluster, None if the head does not know it; and why the head cannot be asked, if so."""
    if endpoint is None:
        return None, f"there is no {home.cluster_file.name} in {home.root}"
    try:
        views = ask(endpoint, "GET", "/v1/nodes", list[NodeView])
    except RacimoError as error:
        return None, error.message
    return own_node(home, [view.node for view in views]), ""


def _is_elsewhere(home: Home, node: Node) -> bool:
    """Whether the node that this home is named after is another machine, whose work is none of ours to end: the home
    was copied, or is shared over a network."""
    state = link_state(home)
    refused = state is not None and state.state == "refused" and supervisor_alive(home)
    return node.host != socket.gethostname() or (refused and node.status == "up")


def _drain(endpoint: Endpoint, node: str, say: Say) -> None:
    """Until no worker is left here, at most `WAIT_MOST_S`; what then still runs ends with the services."""
    began_s = time.monotonic()
    said: tuple[str, ...] = ()
    try:
        ask(endpoint, "POST", f"/v1/nodes/{node}/drain", type(None), DrainRequest(deadline_s=DRAIN_S))
        while time.monotonic() - began_s < WAIT_MOST_S:
            views = ask(endpoint, "GET", "/v1/nodes", list[NodeView])
            held = tuple(sorted({worker for view in views if view.node.id == node for worker in view.leases.values()}))
            if not held:
                return
            if held != said:
                said = held
                say(f"waiting for {len(held)} workers to leave this node ({', '.join(held[:5])})")
            time.sleep(POLL_S)  # the API has no call that waits for a node
        say(f"after {WAIT_MOST_S:.0f} s {len(said)} workers are still here: ending them")
    except RacimoError as error:
        say(f"the head cannot drain this node ({error.message}): ending at once")
