"""Budgets and time limits are hard: everything is prepaid, and what is promised never exceeds what there is."""

from typing import Any

import pytest
from decide_stage import node
from test_decide_tune import TuneStage, first_rounds_best

from racimo.decide.tune.purse import LEAST_SLICE_S, LET_GO_S, MOST_SLICE_S
from racimo.spec.study import StudySpec
from racimo.state import events as ev
from racimo.state.nouns import Exit

A_CENT_A_SECOND = 36.0


def promised(stage: TuneStage, run: str) -> float:
    """What has been spent and what may still be, whatever happens."""
    price = {one.id: one.price_per_device_hour / 3600.0 for one in stage.state.nodes.values()}
    live = sum(price[w.node] * len(w.devices) * w.paid_s for w in stage.run(run).live_workers)
    return stage.run(run).cost + live


class PaidStage(TuneStage):
    def __init__(self, devices: int = 4) -> None:
        super().__init__(node(devices, price_per_device_hour=A_CENT_A_SECOND))

    def work(self, run: str, round_s: float, most: int = 10_000) -> int:
        """Plays with every round taking so long and every slice expiring at its time; returns the slices."""
        for number in range(most):
            self.all_ready(run)
            for one in self.run(run).live_workers:
                if one.leaving:
                    self._gone(run, one.index)
            grants = self.grants(run)
            if not grants:
                return number
            self.clock.at_s += round_s / len(grants)
            worker, grant = min(grants.items(), key=lambda item: item[1].number)
            trial = self.study(run).trials[grant.trial]
            rounds = trial.rounds + 1
            expired = grant.prepaid_s and 2 * round_s > grant.prepaid_s
            outcome = "reached" if grant.until and rounds >= grant.until else "expired" if expired else "halted"
            self.end_slice(run, worker, outcome, first_rounds_best(grant.trial, {}, rounds), rounds=rounds)
        raise AssertionError("it never ends")

    def end_slice(self, run: str, worker: int, outcome: Any = "reached", loss: float | None = 1.0, **more: Any) -> None:
        super().end_slice(run, worker, outcome, loss, **more)
        budget = self.study(run).terms.money
        assert budget is None or promised(self, run) <= budget + 1e-9

    def _gone(self, run: str, index: int) -> None:
        held_s = self.clock.at_s - self.run(run).workers[index].started_at_s
        ending = Exit(outcome="released", code=0, held_s=held_s)
        attempt = self.run(run).attempt
        self.core.agent_event(ev.WorkerExited(run=run, attempt=attempt, index=index, exit=ending))
        self.turn()


@pytest.fixture
def stage() -> PaidStage:
    return PaidStage()


def test_without_a_limit_nothing_is_prepaid() -> None:
    stage = TuneStage(node(2))
    run = stage.tune(trials=4)
    stage.all_ready(run)
    assert all(not grant.prepaid_s and not grant.paid_s for grant in stage.grants(run).values())
    assert not any(worker.paid_s for worker in stage.run(run).live_workers)


def test_workers_share_the_budget_and_nothing_is_promised_twice(stage: PaidStage) -> None:
    run = stage.tune(trials=100, budget="$4")
    stage.all_ready(run)
    grants = stage.grants(run)
    assert len(grants) == 4 and promised(stage, run) <= 4.0
    assert all(60 < grant.prepaid_s <= 100 for grant in grants.values())
    for worker, grant in grants.items():
        assert stage.run(run).workers[worker].paid_s >= grant.prepaid_s + LET_GO_S


def test_a_slice_is_never_prepaid_for_longer_than_the_bound(stage: PaidStage) -> None:
    run = stage.tune(trials=100, budget="$1000")
    stage.all_ready(run)
    assert {grant.prepaid_s for grant in stage.grants(run).values()} == {MOST_SLICE_S}


def test_no_more_workers_are_started_than_there_is_money_for(stage: PaidStage) -> None:
    run = stage.tune(trials=100, budget="$0.40")  # 40 seconds of one device
    assert len(stage.run(run).live_workers) == 2 and promised(stage, run) <= 0.40


def test_a_study_ends_when_its_budget_is_spent(stage: PaidStage) -> None:
    run = stage.tune(trials=10_000, budget="$4")
    stage.work(run, round_s=3.0)
    ended = stage.run(run)
    assert ended.status == "succeeded" and ended.reason is not None and ended.reason.code == "budget-spent"
    assert 3.6 < ended.cost <= 4.0


def test_a_study_whose_budget_is_too_small_for_anything_ends_without_spending(stage: PaidStage) -> None:
    run = stage.tune(trials=10, budget="$0.10")
    assert stage.run(run).status == "succeeded" and stage.run(run).cost == 0.0
    assert stage.run(run).reason.code == "budget-spent"  # type: ignore[union-attr]


def test_a_free_node_costs_nothing_and_limits_nothing() -> None:
    """skypilot#6680: what an owned machine costs is its owner's to say."""
    stage = TuneStage(node(2))
    run = stage.tune(trials=3, budget="$1", scheduler="none")
    stage.play(run, first_rounds_best)
    assert stage.study(run).counts == {"finished": 3}


def test_beside_nodes_that_cost_something_one_that_does_not_goes_on_at_no_cost() -> None:
    stage = TuneStage(node(1, "n1", address="a", price_per_device_hour=A_CENT_A_SECOND), node(1, "n2", address="b"))
    run = stage.tune(trials=1_000, budget="$1")
    stage.all_ready(run)
    free = next(worker for worker in stage.run(run).live_workers if worker.node == "n2")
    grant = stage.grants(run)[free.index]
    assert grant.prepaid_s == MOST_SLICE_S and stage.run(run).workers[free.index].paid_s >= MOST_SLICE_S
    assert promised(stage, run) <= 1.0


def test_at_the_time_limit_every_slice_has_ended(stage: PaidStage) -> None:
    run = stage.tune(trials=10_000, time="2m")
    began_s = stage.clock.at_s
    stage.work(run, round_s=3.0)
    assert stage.run(run).reason.code == "time-over"  # type: ignore[union-attr]
    assert stage.run(run).status == "succeeded" and 90 < stage.clock.at_s - began_s <= 120


def test_time_in_the_queue_or_paused_does_not_count(stage: PaidStage) -> None:
    run = stage.tune(trials=10_000, time="60s", parallel=1)
    stage.all_ready(run)
    stage.core.pause(run)
    stage.turn()
    stage.end_slice(run, 0, "halted")
    stage.exit(run, 0, "paused")
    stage.turn(3_600.0)
    stage.core.resume(run)
    stage.turn()
    stage.all_ready(run)
    ((_, grant),) = stage.grants(run).items()
    assert 40 < grant.prepaid_s < 60 - LET_GO_S + 1


def test_an_idle_worker_goes_before_its_agent_has_to_end_it(stage: PaidStage) -> None:
    run = stage.tune(trials=100, budget="$4", parallel=1, proposer="tpe")
    stage.all_ready(run)
    while stage.grants(run):
        stage.end_slice(run, next(iter(stage.grants(run))), "finished")
    assert stage.core.wants and stage.core.next_due_s is not None
    stage.turn(stage.core.next_due_s - stage.clock.at_s + 0.01)
    assert [worker.leaving for worker in stage.run(run).live_workers] == ["release"]


def test_a_limit_that_comes_later_replaces_the_workers_that_have_none(stage: PaidStage) -> None:
    run = stage.tune(trials=100)
    stage.all_ready(run)
    terms = stage.study(run).terms
    fields = {name: getattr(terms, name) for name in terms.__struct_fields__}
    stage.core.change_study(run, StudySpec(**{**fields, "budget": "$4"}), other_space=False)
    stage.turn()
    assert all(worker.leaving == "release" for worker in stage.run(run).live_workers if not worker.paid_s)
    stage.work(run, round_s=5.0)
    assert stage.run(run).cost <= 4.0


def test_a_lost_worker_costs_no_more_than_was_paid_for_it(stage: PaidStage) -> None:
    run = stage.tune(trials=100, budget="$4", parallel=1)
    stage.all_ready(run)
    paid_s = stage.run(run).workers[0].paid_s
    stage.core.node_silent("n1")
    stage.turn(100_000.0)
    stage.core.forget_node("n1", confirm_dead=True)
    stage.turn()
    assert stage.run(run).device_s == pytest.approx(paid_s)


def test_more_money_goes_on_with_a_study_that_had_spent_its_own(stage: PaidStage) -> None:
    run = stage.tune(trials=10_000, budget="$2")
    stage.work(run, round_s=3.0)
    terms = stage.study(run).terms
    fields = {name: getattr(terms, name) for name in terms.__struct_fields__}
    stage.core.change_study(run, StudySpec(**{**fields, "budget": "$4"}), other_space=False)
    stage.turn()
    stage.work(run, round_s=3.0)
    assert stage.run(run).status == "succeeded" and 3.6 < stage.run(run).cost <= 4.0


def test_the_least_slice_has_room_for_a_round_of_the_usual_length(stage: PaidStage) -> None:
    run = stage.tune(trials=10_000, budget="$4", parallel=1)
    stage.work(run, round_s=20.0)
    granted = [r.event.grant for r in stage.core.store.records(run) if isinstance(r.event, ev.SliceGranted)]
    assert all(grant.prepaid_s >= LEAST_SLICE_S for grant in granted)
    assert stage.run(run).cost <= 4.0
