"""What a tune run looks for, where, how, and until when: the `study` part of its spec."""

import math
import re
from typing import Any, Literal

import msgspec

from racimo.spec.expression import Expression
from racimo.spec.quantity import parse_duration_s
from racimo.spec.space import Parameter, Scalar, Space, key_of, parse_parameter

Proposer = Literal["random", "grid", "quasi-random", "tpe", "gp", "cma-es", "nsga-ii"]
PROPOSERS: tuple[str, ...] = ("random", "grid", "quasi-random", "tpe", "gp", "cma-es", "nsga-ii")
PURE_PROPOSERS: frozenset[str] = frozenset({"random", "grid", "quasi-random"})
"""Computed by the decision itself; the others live in a process of their own."""
SCHEDULERS: tuple[str, ...] = ("asha", "freeze-thaw", "population", "median", "none")

MAX_TRIALS = 1_000_000
MAX_PARALLEL = 10_000
MAX_POINTS = 10_000
MAX_OBJECTIVES = 8
MAX_ROUNDS = 10**9
_MONEY = re.compile(r"[$€£]?\s*(\d+(?:\.\d+)?)")
_METRIC = re.compile(r"(?:(min|max)\s+)?([A-Za-z_][A-Za-z0-9_./-]{0,99})")


class Objective(msgspec.Struct, frozen=True):
    """A metric and whether less of it is better."""

    metric: str
    minimize: bool = True

    def signed(self, value: float) -> float:
        """Less is better; NaN and infinity are worst."""
        if not math.isfinite(value):
            return math.inf
        return value if self.minimize else -value

    def __str__(self) -> str:
        return f"{'min' if self.minimize else 'max'} {self.metric}"


class StudySpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """`space` maps names to ranges and choices as people write them (see `spec.space`); so do `constraints`.

    `metric`: what trials report, `loss` or `max accuracy`; several make a Pareto front. `limits`: conditions on
    metrics that a trial must meet to count (`latency_ms <= 50`). `defaults` are tried first, then `points` in order.

    At most `trials` are begun, `parallel` run at a time (0: as many as devices are there for). `time` and `budget`
    (money, at the nodes' prices) are hard. A *round* is one report of the metric: `first_round` and `eta` say after
    how many the scheduler looks (first, first x eta, ...), `rounds` after how many a trial is complete (0: when its
    function returns). `retries`: how often a trial goes on after its worker died; with `retry_raised` also after its
    function raised. `metric_within`: a trial without any report or step for so long has failed. `fresh`: each trial
    gets a process of its own, for functions that leave something behind. `proposer` and `scheduler` are names, the
    proposer also `FILE.py:CLASS`."""

    space: dict[str, Any]
    metric: str | tuple[str, ...]
    constraints: tuple[str, ...] = ()
    limits: tuple[str, ...] = ()
    defaults: dict[str, Scalar] = {}
    points: tuple[dict[str, Scalar], ...] = ()
    trials: int = 100
    parallel: int = 0
    time: str = ""
    budget: str | float = ""
    proposer: str = "tpe"
    scheduler: str = "asha"
    first_round: int = 1
    eta: int = 3
    rounds: int = 0
    retries: int = 2
    retry_raised: bool = False
    metric_within: str = "10m"
    fresh: bool = False

    def __post_init__(self) -> None:
        space = self.parsed_space
        self._check_metrics()
        for position, point in enumerate((*([self.defaults] if self.defaults else []), *self.points)):
            try:
                space.complete(point)
            except ValueError as error:
                where = "defaults" if self.defaults and position == 0 else f"points[{position - bool(self.defaults)}]"
                raise ValueError(f"study.{where}: {error}") from None
        self._refuse_duplicates(space)
        for name, value, least, most in (
            ("trials", self.trials, 1, MAX_TRIALS),
            ("parallel", self.parallel, 0, MAX_PARALLEL),
            ("first_round", self.first_round, 1, MAX_ROUNDS),
            ("eta", self.eta, 2, 100),
            ("rounds", self.rounds, 0, MAX_ROUNDS),
            ("retries", self.retries, 0, 1_000),
        ):
            if not least <= value <= most:
                raise ValueError(f"study.{name} is from {least} to {most}, not {value}")
        if self.rounds and self.first_round > self.rounds:
            raise ValueError(f"study.first_round {self.first_round} is beyond study.rounds {self.rounds}")
        if self.proposer not in PROPOSERS and not re.fullmatch(r".+\.py:[A-Za-z_]\w*", self.proposer):
            raise ValueError(f"study.proposer is {', '.join(PROPOSERS)} or FILE.py:CLASS, not {self.proposer!r}")
        if self.scheduler not in SCHEDULERS:
            raise ValueError(f"study.scheduler is one of {', '.join(SCHEDULERS)}, not {self.scheduler!r}")
        if self.proposer == "grid" and space.num_points is None:
            endless = next(name for name, one in space.parameters.items() if one.num_values is None)
            raise ValueError(f"a grid needs a step for {endless}: {space.parameters[endless]} step ...")
        if len(self.objectives) > 1 and self.proposer == "cma-es":
            raise ValueError("several metrics go with every proposer but cma-es")
        if len(self.objectives) > 1 and self.scheduler not in ("none", "asha"):
            raise ValueError(f"several metrics go with the schedulers asha and none, not {self.scheduler}")
        for duration in (self.time, self.metric_within):
            if duration:
                parse_duration_s(duration)
        if self.budget != "":
            self._money()

    def _check_metrics(self) -> None:
        if not 1 <= len(self.objectives) <= MAX_OBJECTIVES:
            raise ValueError(f"study.metric names one to {MAX_OBJECTIVES} metrics")
        names = [objective.metric for objective in self.objectives]
        if len(set(names)) < len(names):
            raise ValueError("study.metric names the same metric twice")
        for limit in self.limits:
            Expression(limit, None)

    def _refuse_duplicates(self, space: Space) -> None:
        if len(self.points) > MAX_POINTS:
            raise ValueError(f"study.points has at most {MAX_POINTS} points, not {len(self.points)}")
        seen: dict[Any, str] = {key_of(space.complete(self.defaults)): "defaults"} if self.defaults else {}
        for position, point in enumerate(self.points):
            key = key_of(space.complete(point))
            if key in seen:
                raise ValueError(f"study.points[{position}] is the same point as {seen[key]}")
            seen[key] = f"points[{position}]"

    @property
    def parsed_space(self) -> Space:
        """`ValueError` with the parameter's name where one is not what it should be."""
        parameters: dict[str, Parameter] = {}
        for name, written in self.space.items():
            try:
                parameters[str(name)] = parse_parameter(written)
            except ValueError as error:
                raise ValueError(f"study.space.{name}: {error}") from None
        return Space(parameters=parameters, constraints=self.constraints)

    @property
    def proposer_file(self) -> str:
        """The file of a proposer of the user's own; "" for one that comes with Racimo."""
        return self.proposer.rpartition(":")[0]

    @property
    def objectives(self) -> tuple[Objective, ...]:
        metrics = (self.metric,) if isinstance(self.metric, str) else self.metric
        return tuple(_objective(text) for text in metrics)

    @property
    def first_points(self) -> tuple[dict[str, Scalar], ...]:
        """What is tried before anything is proposed: the defaults, then the points, completed."""
        space = self.parsed_space
        return tuple(space.complete(point) for point in (*([self.defaults] if self.defaults else []), *self.points))

    @property
    def time_s(self) -> float | None:
        return parse_duration_s(self.time) if self.time else None

    @property
    def metric_within_s(self) -> float:
        return parse_duration_s(self.metric_within)

    @property
    def money(self) -> float | None:
        """The budget in the currency of the nodes' prices; None without one."""
        return self._money() if self.budget != "" else None

    def _money(self) -> float:
        match = _MONEY.fullmatch(str(self.budget).strip())
        if match is None:
            raise ValueError(f"study.budget is an amount such as $20 or 12.50, not {self.budget!r}")
        return float(match[1])


def _objective(text: str) -> Objective:
    match = _METRIC.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"study.metric is a name such as loss or `max accuracy`, not {text!r}")
    return Objective(match[2], match[1] != "max")
