"""What a study may still spend: money and time, both hard, whoever dies or does not answer.

A worker's life is prepaid: it is started with some seconds, and each slice pays for some more. At the end of what is
paid its agent ends it, on that machine's own clock. So at any moment no more can be spent than what workers that have
ended cost, and what is paid for those that live; nothing is granted that would bring this sum over the budget.
"""

from collections.abc import Iterable, Mapping
from functools import cached_property

import msgspec
from msgspec.structs import replace

from racimo.decide.fit import ask_of_spec
from racimo.state.nouns import Node, Placement, Run, Worker
from racimo.state.study import Study

SECONDS_PER_HOUR = 3600.0
LET_GO_S = 10.0
"""Paid beyond the end of each slice: the round at hand ends, the trial is saved, the worker leaves."""
CLOCK_GRAIN_S = 0.001
LEAST_SLICE_S = 2.0
MOST_SLICE_S = 600.0
START_LEAST_S, START_MOST_S = 5.0, 900.0
"""For which a worker is paid until its first slice: its environment may have to be built."""
ROUND_MARGIN = 1.5
"""A slice is worth its while if it has room for so many average rounds."""
LEAST_REST = 0.02
"""Of the budget: with less of it no worker is started."""


class Prepaid(msgspec.Struct, frozen=True):
    """`prepaid_s`: seconds for which a slice may run; `paid_s`: seconds of its worker's life paid for. 0: no limit."""

    prepaid_s: float
    paid_s: float


NO_LIMIT = Prepaid(0.0, 0.0)


class Purse:
    """One decision's account of a study: what is granted in it counts at once."""

    def __init__(self, run: Run, study: Study, nodes: Mapping[str, Node], now_s: float) -> None:
        self._run, self._study, self._nodes, self._now_s = run, study, nodes, now_s
        self._money, self._time_s = study.terms.money, study.terms.time_s
        self._rest = 0.0
        """Money that is neither spent nor promised."""
        self._share = 0.0
        """Money that each worker may count on."""
        if self._money is not None:
            live = run.live_workers
            self._rest = self._money - run.cost - sum(self._rate(w) * max(w.paid_s, self._age_s(w)) for w in live)
            left = self._money - run.cost - sum(self._rate(w) * self._age_s(w) for w in live)
            self._share = left / max(1, sum(not worker.leaving and bool(worker.devices) for worker in live))

    @property
    def limited(self) -> bool:
        return self._time_s is not None or (self._money is not None and self._dearest > 0)

    @property
    def time_left_s(self) -> float:
        return float("inf") if self._time_s is None else self._time_s - self._run.active_until(self._now_s)

    @property
    def time_over(self) -> bool:
        return self.time_left_s < self._need_s + LET_GO_S

    def slice_for(self, worker: Worker) -> Prepaid | None:
        """What the worker's next slice may take; None if there is not enough for one that is worth its while."""
        if not self.limited:
            return NO_LIMIT
        rate, age_s, need_s = self._rate(worker), self._age_s(worker), self._need_s
        most_s = min(self.time_left_s - LET_GO_S, max(MOST_SLICE_S, need_s))
        if self._money is not None and rate > 0:  # on a node that costs nothing only time counts
            paid_s = min(
                age_s + max(self._share / rate, need_s + LET_GO_S), max(worker.paid_s, age_s) + self._rest / rate
            )
            most_s = min(most_s, paid_s - age_s - LET_GO_S)
        if most_s < need_s:
            return None
        return Prepaid(most_s, max(worker.paid_s, age_s + most_s + LET_GO_S))

    def grant(self, worker: Worker, prepaid: Prepaid) -> None:
        more_s = prepaid.paid_s - max(worker.paid_s, self._age_s(worker))
        self._rest -= self._rate(worker) * max(0.0, more_s)

    def runs_unpaid(self, worker: Worker) -> bool:
        """True for one that was started, or runs a slice, from before there was a limit."""
        return bool(worker.devices) and not worker.paid_s and self.limited

    def num_startable(self, most: int) -> int:
        """Up to `most` workers, as many as are worth their while."""
        least_s = START_LEAST_S + LET_GO_S + self._need_s
        if self.time_left_s < least_s:
            return 0
        if self._money is None or self._dearest <= 0:
            return most
        if self._rest < self._money * LEAST_REST:
            return 0
        return max(0, min(most, int(self._rest / (self._dearest * least_s))))

    def pay(self, placements: Iterable[Placement]) -> tuple[Placement, ...]:
        """Workers that are to be started, with what is paid for each until its first slice."""
        places = tuple(placements)
        if not self.limited or not places:
            return places
        paid_s = min(START_MOST_S, max(0.0, self.time_left_s))
        if self._money is not None and self._dearest > 0:
            half_s = self._rest / (len(places) * self._dearest) / 2
            paid_s = min(paid_s, max(half_s, START_LEAST_S + LET_GO_S))
        self._rest -= self._dearest * paid_s * len(places)
        return tuple(replace(place, paid_s=paid_s) for place in places)

    @property
    def over_at_s(self) -> float:
        """When on the cluster's clock the study's time is over, if it goes on until then."""
        return self._now_s + self.time_left_s - LET_GO_S - self._need_s + CLOCK_GRAIN_S

    def paid_until_s(self, worker: Worker) -> float:
        """When on the cluster's clock an idle worker has to go, so that its agent need not end it."""
        return worker.started_at_s + worker.paid_s - LET_GO_S / 2 if worker.paid_s else float("inf")

    @cached_property
    def _need_s(self) -> float:
        """Seconds that a slice should have at least: one round of the usual length."""
        study = self._study
        if not study.num_rounds:
            return LEAST_SLICE_S
        devices = self._run.spec.devices_per_worker / self._run.spec.shares
        mean_s = study.device_s / devices / study.num_rounds
        return max(LEAST_SLICE_S, ROUND_MARGIN * mean_s)

    @cached_property
    def _dearest(self) -> float:
        """Money per second of a worker on the dearest node that it may be placed on."""
        ask = ask_of_spec(self._run.spec)
        prices = (
            node.price_per_device_hour
            for node in self._nodes.values()
            if any(ask.wants(device.kind) for device in node.devices)
        )
        return max(prices, default=0.0) * ask.per_worker / ask.shares / SECONDS_PER_HOUR

    def _rate(self, worker: Worker) -> float:
        node = self._nodes.get(worker.node)
        known = node.price_per_device_hour if node is not None else 0.0
        return known * self._run.num_devices_of(worker) / SECONDS_PER_HOUR

    def _age_s(self, worker: Worker) -> float:
        return max(0.0, self._now_s - worker.started_at_s)
