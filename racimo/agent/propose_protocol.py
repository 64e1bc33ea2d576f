"""The messages with the process that proposes points for a tune run: control asks, its node's agent passes it on."""

import msgspec

from racimo.spec.proposer import Outcome
from racimo.spec.study import StudySpec
from racimo.state.nouns import Failure
from racimo.state.trials import Proposal


class _Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type", tag=True):
    pass


class ProposerAsk(_Message, frozen=True, kw_only=True):
    """Wanted: `count` points for the trials from `first` on. What is to be known for it are the trials from
    `newest_from` up to `first` and `best`, the best ones before those; `outcomes` are those of them that have changed
    since the last answer. `number` counts the questions; the answer repeats it.

    `terms`: if they are new to this process. Named points are left out of them."""

    number: int
    first: int
    count: int
    seed: int
    newest_from: int = 0
    best: tuple[int, ...] = ()
    outcomes: tuple[Outcome, ...] = ()
    terms: StudySpec | None = None


class AskProposer(_Message, frozen=True, kw_only=True):
    """For the process `worker`, now or once it has connected. Answered with `Proposed`; refused as `not-found` if it
    has ended, or ends before it answers. A new question takes the place of one that is not answered yet."""

    worker: str
    ask: ProposerAsk


class Proposed(_Message, frozen=True, kw_only=True):
    """The answer to question `number`: points, or what it lacks to answer it (`missing` trials, the `terms`), or how
    the proposer failed. No points and no failure: it has none left."""

    number: int
    proposals: tuple[Proposal, ...] = ()
    missing: tuple[int, ...] = ()
    needs_terms: bool = False
    failure: Failure | None = None
