"""How many points a proposer that learns is asked for before a worker is free.

A point that waits was proposed without what was learnt meanwhile, so this is only for trials that are over so quickly
that workers would wait longer for the answer than it is worth (ray#46965: workers idle while one trial is pending).
"""

from racimo.decide.tune.draw import NUM_FIRST_RANDOM
from racimo.spec.study import PURE_PROPOSERS
from racimo.state.study import Study

SHORT_TRIAL_S = 1.0
"""Device-seconds of the trial that ended last, below which its successors are asked for ahead."""
MOST_AHEAD = 16


def num_ahead(study: Study) -> int:
    """Points to be asked for now so that as many are there as trials run."""
    learns = study.terms.proposer not in PURE_PROPOSERS
    if not learns or study.last_ended is None or not study.num_to_propose:
        return 0
    if len(study.trials) < len(study.first_points) + NUM_FIRST_RANDOM:
        return 0
    if study.trials[study.last_ended].device_s >= SHORT_TRIAL_S:
        return 0
    there = sum(study.trials[number].grant is None for number in study.waiting)
    return min(max(0, min(len(study.running), MOST_AHEAD) - there), study.num_to_propose)
