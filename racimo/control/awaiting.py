"""What workers wait for that have devices and no process yet: files on their way, environments, zygotes."""

import time

from racimo.control.carrier import Carrier
from racimo.control.usage import usage_of
from racimo.state.nouns import Node, Reason, Run

MAX_CAUSES = 5


async def starting_reason(run: Run, nodes: dict[str, Node], carrier: Carrier) -> Reason | None:
    """One sentence with the hosts and since when; None if every worker has its process, or nothing is known."""
    starting = [worker for worker in run.live_workers if worker.pid is None]
    if run.status != "running" or not starting:
        return None
    places = sorted({worker.node for worker in starting})
    causes = []
    for name, usage in (await usage_of(carrier, places)).items():
        host = nodes[name].host
        causes += [words if words.startswith(host) else f"{host}: {words}" for words in usage.warnings]
    now_s = time.monotonic()
    for name in places:
        transfer = carrier.shipping.to(name)
        if transfer is not None:
            passed_s = now_s - transfer.begun_s
            causes.append(f"{nodes[name].host} has been getting {len(transfer.contents)} files for {passed_s:.0f} s")
    if not causes:
        return None
    more = f"; and {len(causes) - MAX_CAUSES} more" if len(causes) > MAX_CAUSES else ""
    num = len(starting)
    text = f"{num} workers have no process yet: {'; '.join(causes[:MAX_CAUSES])}{more}"
    return Reason(code="workers-starting", text=text, counts={"workers": num})
