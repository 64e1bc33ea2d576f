"""What the proposing process answers: it keeps what it was told, and says so when that is not enough."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from racimo.agent.propose_protocol import Proposed, ProposerAsk
from racimo.spec.errors import RacimoError
from racimo.spec.proposer import Outcome, Proposer, Suggestion
from racimo.spec.study import StudySpec
from racimo.state.nouns import Failure
from racimo.state.trials import Proposal
from racimo.worker.tune.propose import make_proposer
from racimo.worker.user_errors import failure_from


class Answers:
    """One proposer for as long as the terms are the same. `folder`: where the run's files are."""

    def __init__(self, folder: Path, worker: str) -> None:
        self._folder, self._worker = folder, worker
        self._terms: StudySpec | None = None
        self._proposer: Proposer | None = None
        self._known: dict[int, Outcome] = {}

    def answer(self, ask: ProposerAsk) -> Proposed:
        """Whatever the proposer raises is an answer, too."""
        try:
            return self._answer(ask)
        except BaseException as error:  # noqa: BLE001 - user code may raise anything, and that ends the study, not us
            terms, self._terms = ask.terms or self._terms, None  # a next question begins anew
            found = failure_from(error, str(self._folder), 0, self._worker)
            name = terms.proposer if terms is not None else "the proposer"
            message = found.message if isinstance(error, RacimoError) else f"{name} raised {found.message}"
            failure = Failure(
                code="proposer-failed",
                message=message,
                hint=found.hint,
                traceback=found.traceback,
                worker=self._worker,
            )
            return Proposed(number=ask.number, failure=failure)

    def _answer(self, ask: ProposerAsk) -> Proposed:
        if ask.terms is not None and ask.terms != self._terms:
            self._known = {}
            self._proposer = make_proposer(ask.terms, ask.seed, self._folder)
            self._terms = ask.terms
        if self._terms is None or self._proposer is None:
            return Proposed(number=ask.number, needs_terms=True)
        wanted = dict.fromkeys([*ask.best, *range(ask.newest_from, ask.first)])
        told = {one.number: one for one in ask.outcomes}
        missing = tuple(number for number in wanted if number not in self._known and number not in told)
        if missing:
            return Proposed(number=ask.number, missing=missing)
        self._take(wanted, told)
        return Proposed(number=ask.number, proposals=_proposals(self._proposer.ask(ask.count), self._terms))

    def _take(self, wanted: Mapping[int, None], told: Mapping[int, Outcome]) -> None:
        assert self._proposer is not None
        gone = [number for number in self._known if number not in wanted]
        for number in gone:
            del self._known[number]
        forget = getattr(self._proposer, "forget", None)
        if gone and forget is not None:
            forget(gone)
        news = [told[number] for number in sorted(told) if number in wanted]
        fresh = [outcome for outcome in news if self._known.get(outcome.number) != outcome]
        self._known |= {outcome.number: outcome for outcome in fresh}
        if fresh:
            self._proposer.tell(fresh)


def _proposals(points: Any, terms: StudySpec) -> tuple[Proposal, ...]:
    if not isinstance(points, Sequence) or isinstance(points, str | bytes):
        raise TypeError(f"ask() of {terms.proposer} returns a list of points, not {points!r:.200}")
    return tuple(_proposal(point, terms) for point in points)


def _proposal(point: Any, terms: StudySpec) -> Proposal:
    by = terms.proposer
    if isinstance(point, Suggestion):
        point, by = point.values, point.by
    if not isinstance(point, Mapping):
        raise TypeError(f"a point of {terms.proposer} is a dict of values by parameter, not {point!r:.200}")
    values = {str(name): value.item() if hasattr(value, "item") else value for name, value in point.items()}
    for name, value in values.items():
        if not isinstance(value, bool | int | float | str | None):
            raise TypeError(f"{terms.proposer} gave {name} the value {value!r:.200}, a {type(value).__name__}")
    return Proposal(values=values, by=by)
