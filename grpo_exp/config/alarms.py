"""Which thresholds of the collapse alarm make sense. Imports no torch."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from ..errors import ConfigError
from .schema import AlarmAction, AlarmConfig, AlarmRule


class Allowed(NamedTuple):
    text: str
    holds: Callable[[float], bool]


FACTOR = Allowed("a number > 1", lambda value: 1 < value < 1e30)
SHARE = Allowed("a number between 0 and 1", lambda value: 0 < value < 1)
POSITIVE = Allowed("a number > 0", lambda value: 0 < value < 1e30)

THRESHOLDS = {"beta": FACTOR, "ess": SHARE, "kl": POSITIVE, "entropy": SHARE, "gradient": FACTOR, "length": FACTOR}


def rules(config: AlarmConfig) -> dict[str, AlarmRule]:
    """Name → settings of every rule that is on."""
    named = {name: getattr(config, name) for name in THRESHOLDS}
    return {name: rule for name, rule in named.items() if rule.action is not AlarmAction.none}


def alarm_problems(config: AlarmConfig) -> Iterable[ConfigError]:
    for name, allowed in THRESHOLDS.items():
        rule: AlarmRule = getattr(config, name)
        if not allowed.holds(rule.threshold):
            yield ConfigError(f"alarm.{name}.threshold", rule.threshold, allowed.text)
        if rule.window < 1:
            yield ConfigError(f"alarm.{name}.window", rule.window, "1 or more")
    if not 0 <= config.hysteresis < 1:
        yield ConfigError("alarm.hysteresis", config.hysteresis, "a number from 0 up to, but not, 1")
    if not SHARE.holds(config.lr_factor):
        yield ConfigError("alarm.lr_factor", config.lr_factor, SHARE.text)
