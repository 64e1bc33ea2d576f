"""What is to be done outside, as frozen values: the only exit of `Core`. Each may be done twice without harm."""

from typing import Literal

import msgspec

from racimo.agent import protocol
from racimo.state.nouns import Placement


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """Start this worker on `node`; `Core.order_for(worker)` has the order, files and secrets are added on the way."""

    node: str
    worker: str
    run: str
    attempt: int
    placement: Placement


class Stop(msgspec.Struct, frozen=True, kw_only=True):
    """End, freeze or thaw one worker; an agent that does not know it answers Ok."""

    node: str
    worker: str
    how: Literal["stop", "abort", "pause", "thaw", "release"]
    grace_s: float = 10.0

    def message(self) -> protocol.StopWorker:
        return protocol.StopWorker(worker=self.worker, how=self.how, grace_s=self.grace_s)


class Announce(msgspec.Struct, frozen=True, kw_only=True):
    """Tell `node` a run's newest generation; one such effect for each node with live workers of the attempt."""

    node: str
    run: str
    attempt: int
    number: int
    members: tuple[protocol.Member, ...]
    reason: str

    def message(self) -> protocol.Announce:
        return protocol.Announce(
            run=self.run, attempt=self.attempt, number=self.number, members=self.members, reason=self.reason
        )


class Slice(msgspec.Struct, frozen=True, kw_only=True):
    """Give a worker a slice of a trial."""

    node: str
    worker: str
    order: protocol.SliceOrder

    def message(self) -> protocol.RunSlice:
        return protocol.RunSlice(worker=self.worker, order=self.order)


class Forget(msgspec.Struct, frozen=True, kw_only=True):
    """Drop what `node` keeps of an ended run."""

    node: str
    run: str

    def message(self) -> protocol.ForgetRun:
        return protocol.ForgetRun(run=self.run)


Effect = Start | Stop | Announce | Slice | Forget
