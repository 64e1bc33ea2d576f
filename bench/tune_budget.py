"""[tune-budget] A thousand random studies with budgets, each in a simulated world where workers start late, are slow,
hang and die and the control process is away for minutes: what was really spent, and what had been forecast.

The decisions are the real ones; what agents and workers do is simulated (`racimo.sim.studies`).
"""

from bench.harness import Goal, Row, percentile, quick, row
from racimo.sim.checks import Violated
from racimo.sim.studies import Ended, random_study

STUDIES, QUICK_STUDIES = 1_000, 60
FIRST_SEED = 10_000
"""Others than the tests'."""


def run() -> list[Row]:
    over, ended, used = 0, list[Ended](), list[float]()
    num_studies = QUICK_STUDIES if quick() else STUDIES
    for seed in range(FIRST_SEED, FIRST_SEED + num_studies):
        play = random_study(seed)
        try:
            one = play.run()
        except Violated as violated:
            over += 1
            print(violated)
            continue
        ended.append(one)
        if one.code == "budget-spent" and play.terms.money:
            used.append(one.spent / play.terms.money)
    errors = [abs(one.forecast / one.spent - 1.0) for one in ended if one.forecast is not None and one.spent > 0]
    within = sum(error <= 0.15 for error in errors) / len(errors)
    return [
        row(f"budgets exceeded, of {num_studies} studies", over, "", Goal("<=", 0)),
        row("share of the budget used where it ended the study, median", 100 * percentile(used, 50), "%",
            note=f"of {len(used)} studies; p10 {100 * percentile(used, 10):.0f} %"),
        row("error of the cost forecast once ten trials are in, median", 100 * percentile(errors, 50), "%",
            Goal("<=", 15), note=f"of {len(errors)} studies; p75 {100 * percentile(errors, 75):.0f} %,"
            f" within 15 %: {100 * within:.0f} % of them"),
    ]  # fmt: skip
