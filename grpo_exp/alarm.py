"""The collapse alarm: rules over the metrics of the last steps, and what follows when one fires. Imports no torch.

A rule looks at the median of the last ``window`` values of one metric, fixed or in relation to its start, the median of the
first ``window`` values. It fires once, when that passes the threshold, and can fire again only after it has receded by
``alarm.hysteresis``. Steps without a value (null, or a gradient of exactly 0) do not count. All state is plain numbers that
a checkpoint holds, so a resumed run fires as the unbroken one would.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum
from statistics import median
from typing import Any

from .config.alarms import rules
from .config.schema import AlarmAction, AlarmConfig, AlarmRule


class Sign(Enum):
    """How a value becomes the one number that is compared with the threshold."""

    above = "above"  # the value
    below = "below"
    growth = "growth"  # value / start
    shrink = "shrink"
    change = "change"  # the larger of value / start and start / value


@dataclass(frozen=True)
class Measure:
    metric: str
    sign: Sign
    least_start: float = 0.0  # a start below it counts as this much: growth of what is next to nothing says nothing


MEASURES = {
    "beta": Measure("mismatch/lag_0", Sign.growth, least_start=0.02),
    "ess": Measure("mismatch/ess", Sign.below),
    "kl": Measure("mismatch/k3", Sign.above),
    "entropy": Measure("entropy/mean", Sign.shrink, least_start=1e-6),
    "gradient": Measure("grad/norm", Sign.growth),
    "length": Measure("completion/length_mean", Sign.change),
}


@dataclass
class RuleState:
    """What one rule remembers. ``firing``: it has fired and not receded since."""

    first: list[float] = field(default_factory=list)
    recent: list[float] = field(default_factory=list)
    firing: bool = False


@dataclass(frozen=True)
class Fired:
    """``value``: what was compared with the threshold; ``start`` is null where the rule knows none."""

    rule: str
    metric: str
    value: float
    threshold: float
    start: float | None
    action: AlarmAction


def look(name: str, rule: AlarmRule, hysteresis: float, state: RuleState, value: object) -> Fired | None:
    """Give a rule the metric of one step; it fires, or not. ``state`` is changed."""
    measure = MEASURES[name]
    if not isinstance(value, int | float) or not math.isfinite(value) or (value == 0 and measure.sign is Sign.growth):
        return None
    if len(state.first) < rule.window:
        state.first.append(float(value))
    state.recent = [*state.recent, float(value)][-rule.window :]
    if len(state.recent) < rule.window:
        return None
    start = max(median(state.first), measure.least_start)
    compared = _compared(measure.sign, median(state.recent), start)
    if not state.firing and _excess(measure.sign, compared, rule.threshold) > 1:
        state.firing = True
        related = measure.sign not in (Sign.above, Sign.below)
        return Fired(name, measure.metric, compared, rule.threshold, start if related else None, rule.action)
    if _excess(measure.sign, compared, rule.threshold) < 1 - hysteresis:
        state.firing = False
    return None


def _compared(sign: Sign, value: float, start: float) -> float:
    match sign:
        case Sign.above | Sign.below:
            return value
        case Sign.growth | Sign.shrink:
            return value / start
        case Sign.change:
            return max(value / start, start / value)


def _excess(sign: Sign, compared: float, threshold: float) -> float:
    """Above 1 beyond the threshold, on whichever side that is."""
    if sign in (Sign.below, Sign.shrink):
        return threshold / compared if compared > 0 else math.inf
    return compared / threshold


class Alarm:
    """The rules of one run and what they have led to.

    Attributes:
        lr_factor: what the learning rate is multiplied by.
        stop_reason: why the run has to end; None if it has not.
        good_until: the last step before the window in which the alarm was rung that ended the run.
    """

    def __init__(self, config: AlarmConfig) -> None:
        self.config, self.rules = config, rules(config)
        self.states = {name: RuleState() for name in self.rules}
        self.lr_factor = 1.0
        self.stop_reason: str | None = None
        self.good_until: int | None = None

    @property
    def reach(self) -> int:
        """How many steps back what is seen now may have begun, where it would end the run; 0 where nothing would."""
        return max((rule.window for rule in self.rules.values() if rule.action is AlarmAction.stop), default=0)

    def check(self, row: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Look at the metrics of a step; returns an event for every rule that fired."""
        events = []
        for name, rule in self.rules.items():
            value = row.get(MEASURES[name].metric)
            fired = look(name, rule, self.config.hysteresis, self.states[name], value)
            if fired is not None:
                events.append(asdict(fired) | self._act(fired, row["step"]))
        return events

    def _act(self, fired: Fired, step: int) -> dict[str, Any]:
        match fired.action:
            case AlarmAction.lower_lr:
                self.lr_factor *= self.config.lr_factor
                return {"lr_factor": self.lr_factor}
            case AlarmAction.stop if self.stop_reason is None:
                self.stop_reason = f"alarm.{fired.rule}: {in_words(asdict(fired))}"
                self.good_until = step - self.rules[fired.rule].window
        return {}

    def state_dict(self) -> dict[str, Any]:
        kept = {"lr_factor": self.lr_factor, "stop_reason": self.stop_reason, "good_until": self.good_until}
        return {**kept, "rules": {name: asdict(state) for name, state in self.states.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Nothing happens for an empty one, of a checkpoint from before there was an alarm."""
        if state:
            self.lr_factor, self.stop_reason = state["lr_factor"], state["stop_reason"]
            self.good_until = state["good_until"]
            known = state["rules"]
            self.states = {name: RuleState(**known[name]) if name in known else RuleState() for name in self.rules}


def in_words(event: Mapping[str, Any]) -> str:
    """An event for people."""
    related = "" if event["start"] is None else f" times its start, {event['start']:.3g}"
    return f"{event['metric']} is {event['value']:.3g}{related} (threshold {event['threshold']:g})"
