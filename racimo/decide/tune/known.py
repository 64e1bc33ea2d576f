"""What a proposer is told of a trial."""

from collections.abc import Sequence

from racimo.spec.proposer import Outcome
from racimo.state.trials import Trial


def outcome_of(trial: Trial, levels: Sequence[int]) -> Outcome:
    """`levels`: of the study, in which its scheduler compares trials."""
    return Outcome(
        number=trial.number,
        values=trial.values,
        status=trial.status,
        rounds=trial.rounds,
        metrics=trial.metrics,
        curve=tuple(point for point in trial.curve if point[0] in levels),
    )
