"""The state that one worker gives to another brings what it needs to stand in for it."""

from types import SimpleNamespace
from typing import Any, cast

import torch

from racimo.worker.train.batches import Batches
from racimo.worker.train.buffers import REDUCED_SLOT
from racimo.worker.train.messages import Outcome
from racimo.worker.train.position import Plan, Position
from racimo.worker.train.saver import Place
from racimo.worker.train.state import Trained


def position() -> Position:
    model = torch.nn.Linear(3, 2)
    trained = Trained(model, [torch.optim.SGD(model.parameters(), lr=0.1)], {})
    batches = Batches(list(range(64)), global_batch_size=8, seed=0)
    plan = Plan(batches=batches, until=9, micro_shards=4, exact=True, check_every=0, place=Place(None, ""))
    quiet = SimpleNamespace(resumed=lambda step: None, begin_at=lambda step: None)
    return Position(trained, plan, cast(Any, quiet), cast(Any, quiet))


def committed(step: int) -> Outcome:
    return Outcome(
        step=step, generation=1, weight=1.0, loss=0.5, num_samples=8, used=b"\x03", pause=False, contributions={}
    )


def test_who_trails_is_given_the_state_alone_and_says_so() -> None:
    giver, taker = position(), position()
    giver.step, giver.fresh, giver.last = 4, False, committed(4)
    giver._store.arena.reduced_step = 4

    taker.accept_state(*giver.offer_state(with_gradient=False))

    assert (taker.step, taker.given, taker._store.arena.reduced_step) == (4, True, 0)


def test_the_gradient_of_the_last_step_comes_with_the_state_of_one_that_is_waited_for() -> None:
    giver, taker = position(), position()
    giver.step, giver.fresh, giver.last = 4, False, committed(4)
    for flat in giver._store.arena.flats(REDUCED_SLOT):
        flat.fill_(2.5)
    giver._store.arena.reduced_step = 4

    taker.accept_state(*giver.offer_state(with_gradient=True))

    assert (taker.step, taker.fresh, taker.last) == (4, False, giver.last)
    assert taker._store.arena.reduced_step == 4
    assert all(bool((flat == 2.5).all()) for flat in taker._store.arena.flats(REDUCED_SLOT))


def test_a_gradient_that_is_being_overwritten_does_not_come_and_none_is_claimed() -> None:
    giver, taker = position(), position()
    giver.step, giver.fresh, giver.last = 4, False, committed(4)
    giver._store.arena.reduced_step = 0
    taker._store.arena.reduced_step = 4  # of an earlier life

    taker.accept_state(*giver.offer_state(with_gradient=True))

    assert taker.step == 4
    assert taker._store.arena.reduced_step == 0, "it would be given to others as the gradient of step 4"
