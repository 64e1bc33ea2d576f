"""What the members of a new generation agree on, from what each declares of itself."""

from typing import Any

import pytest

from racimo.spec.errors import RacimoError
from racimo.worker.train.messages import Declare, Identity
from racimo.worker.train.settle import CatchUp, CopyState, Go, Restore, verdict

SAME = Identity(micro_shards=8, seed=0, global_batch_size=32, dataset_size=100, parameters="4 (0)", coherence="exact")


def at(step: int, **more: Any) -> Declare:
    return Declare(round=1, step=step, fresh=False, identity=SAME, numerics="one", **more)


def fresh(shelf: int = -1) -> Declare:
    here = (0, shelf) if shelf >= 0 else (-1, -1)
    return Declare(round=1, step=0, fresh=True, identity=SAME, numerics="one", shelf=here)


def test_if_nobody_has_state_the_one_with_the_newest_checkpoint_restores_it() -> None:
    assert verdict([fresh(), fresh(10), fresh(15), fresh(15)]) == Restore(2)
    assert verdict([fresh(), fresh()]) == Restore(0)


def test_before_anything_was_computed_all_begin_together() -> None:
    assert verdict([fresh(), at(5, untouched=True), fresh()]) == CopyState(1, (0, 2))


def test_later_a_fresh_member_trails_and_nobody_waits() -> None:
    assert verdict([at(5), at(5), fresh()]) == Go(5, active=(0, 1), lack=(2,))


def test_who_is_one_commit_behind_takes_the_gradient_first() -> None:
    assert verdict([at(5), at(6, gives=True), fresh()]) == CatchUp(1, (0,))


def test_the_gradient_is_taken_from_one_that_still_holds_it() -> None:
    assert verdict([at(6), at(6, gives=True), at(5)]) == CatchUp(1, (2,))


def test_who_trails_a_step_behind_those_who_hold_that_gradient_no_more_needs_the_state_anew() -> None:
    assert verdict([at(9), at(9), at(8, reaches=8)]) == Go(9, active=(0, 1), lack=(2,))


def test_a_state_that_was_given_without_its_gradient_counts_for_nothing_while_others_lack_that_step() -> None:
    """Who gave it is gone: the others make the step themselves, and it is given their state."""
    ahead = at(6, given=True, reaches=6)
    assert verdict([at(5), at(5), ahead]) == Go(5, active=(0, 1), lack=(2,))
    assert verdict([at(4, reaches=4), at(5), ahead]) == Go(5, active=(1,), lack=(0, 2))
    assert verdict([at(5), at(6, gives=True), ahead]) == CatchUp(1, (0,))
    assert verdict([at(3, reaches=5), ahead]) == Go(6, active=(1,), lack=(0,))


def test_an_active_member_whose_gradient_nobody_holds_is_a_contradiction() -> None:
    with pytest.raises(RacimoError, match="one commit"):
        verdict([at(6), at(5)])


def test_who_trails_and_has_stored_all_gradients_follows_with_them() -> None:
    assert verdict([at(9), at(9), at(5, reaches=9)]) == Go(9, active=(0, 1), follow=(2,))


def test_who_trails_and_lacks_one_needs_the_state_anew() -> None:
    assert verdict([at(9), at(9), at(5, reaches=8)]) == Go(9, active=(0, 1), lack=(2,))


def test_one_that_trailed_and_alone_has_committed_the_newest_step_gives_it_to_the_others() -> None:
    assert verdict([at(8), at(8), at(9, reaches=9, gives=True)]) == CatchUp(2, (0, 1))


def test_of_those_that_are_left_when_all_whom_they_followed_are_gone_the_furthest_goes_on() -> None:
    assert verdict([at(5, reaches=5), at(9, reaches=9)]) == Go(9, active=(1,), lack=(0,))


def test_active_members_more_than_a_commit_apart_contradict_each_other() -> None:
    with pytest.raises(RacimoError, match="more than one commit apart"):
        verdict([at(3), at(5)])
