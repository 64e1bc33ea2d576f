"""What becomes of points that a proposer in a process of its own has named: trials, or the end of the study."""

from collections.abc import Sequence

from racimo.decide.tune.draw import draw_random
from racimo.spec.space import key_of
from racimo.state.events import TrialsProposed
from racimo.state.nouns import Failure
from racimo.state.study import Study
from racimo.state.trials import Proposal

MAX_SHOWN_CHARS = 300


def accept(study: Study, run: str, seed: int, count: int, proposals: Sequence[Proposal]) -> TrialsProposed:
    """New trials for an answer to "`count` points".

    A point outside the space fails the study. In the place of one that is there already or breaks a constraint, and of
    what a built-in proposer could not find, comes a random draw, called one (`by`). No points at all: there is nothing
    more to be tried."""
    first, kept, keys = len(study.trials), [], set()
    for proposal in proposals[:count]:
        try:
            values = study.space.complete(proposal.values, constraints=False)
        except ValueError as error:
            return TrialsProposed(run=run, first=first, proposals=(), failure=_outside(study, proposal, error))
        key = key_of(values)
        fresh = key not in keys and study.known(values) is None and not study.space.broken_constraint(values)
        if fresh:
            kept.append(Proposal(values=values, by=proposal.by))
            keys.add(key)
    wanted = len(proposals[:count]) if study.terms.proposer_file else count
    lacking = wanted - len(kept)
    drawn = draw_random(study, seed, lacking, kept) if lacking > 0 else []
    exhausted = not kept and not drawn
    return TrialsProposed(run=run, first=first, proposals=(*kept, *drawn), exhausted=exhausted)


def _outside(study: Study, proposal: Proposal, error: ValueError) -> Failure:
    shown = repr(proposal.values)
    shown = shown if len(shown) <= MAX_SHOWN_CHARS else shown[:MAX_SHOWN_CHARS] + "..."
    return Failure(
        code="proposer-failed",
        message=f"the proposer {study.terms.proposer} proposed a point outside the space: {error}",
        hint=f"it proposed {shown}",
    )
