"""A node whose processes have all ended here is taken off the head's list."""

import time

from racimo.client.discovery import Endpoint
from racimo.client.probing import ask
from racimo.client.say import Say
from racimo.control.views import ForgetRequest
from racimo.spec.errors import RacimoError

FORGET_MOST_S = 10.0
POLL_S = 0.2


def forget(endpoint: Endpoint, node: str, say: Say) -> bool:
    """True once the head no longer knows this node, all of whose processes have ended; else why not is said."""
    until_s = time.monotonic() + FORGET_MOST_S
    while True:
        try:
            ask(endpoint, "POST", f"/v1/nodes/{node}/forget", type(None), ForgetRequest(confirm_dead=True))
            return True
        except RacimoError as error:
            if error.code == "node-unknown":
                return True
            # Until the head has noticed that the link is gone, the node is up there and cannot be forgotten.
            if error.code != "wrong-state" or time.monotonic() > until_s:
                say(f"the head has not forgotten this node: {error.message}")
                return False
        time.sleep(POLL_S)
