"""Which parts of a correction go together. Imports no torch.

A setting that would do nothing is refused as much as one that is wrong: a bound that no weight uses, a weight that is
always 1. So what a configuration says about a correction is what the run did.
"""

import math

from ..errors import ConfigError
from .schema import Backend, Config, CorrectionConfig, Proximal, Weight

BOUNDED = (Weight.token_tis, Weight.seq_tis)
REJECTING = (Weight.token_icepop, Weight.seq_mis)
POSITIVE = "a number > 0"


def correction_problems(config: Config) -> list[ConfigError]:
    """Every problem of the group ``correction``."""
    correction = config.correction
    problems = [*_bound_problems(correction), *_mask_problems(correction)]
    if correction.weight is not Weight.none and correction.proximal is Proximal.rollout:
        reason = "with rollout the ratio is exp(new - mu): it holds exp(old - mu) already, and the weight would be 1"
        allowed = [name for name in Proximal.__members__ if name != Proximal.rollout.name]
        problems.append(ConfigError("correction.proximal", Proximal.rollout.name, allowed, reason))
    if correction.batch_norm and correction.weight not in (Weight.token, *BOUNDED):
        reason = "what a weight rejects would be given to the others" if correction.weight in REJECTING else "no weight"
        problems.append(ConfigError("correction.batch_norm", True, "false", reason))
    generates = config.rollout.backend is not Backend.replay
    if correction.proximal is Proximal.interpolate and generates and config.rollout.staleness_bound < 2:
        reason = "it is mu for tokens that are 0 or 1 versions old: set rollout.max_staleness=2 or more"
        problems.append(ConfigError("correction.proximal", correction.proximal.name, Proximal.rollout.name, reason))
    return problems


def _bound_problems(correction: CorrectionConfig) -> list[ConfigError]:
    weight, low, high = correction.weight, correction.weight_low, correction.weight_high
    problems = []
    uses_low, uses_high = weight in REJECTING, weight in (*BOUNDED, *REJECTING)
    for name, value, used in (("weight_low", low, uses_low), ("weight_high", high, uses_high)):
        if value is not None and not used:
            reason = f"correction.weight={weight.name} has no such bound"
            problems.append(ConfigError(f"correction.{name}", value, "null", reason))
        elif value is not None and not 0 < value < math.inf:
            problems.append(ConfigError(f"correction.{name}", value, POSITIVE))
    if uses_high and high is None:
        problems.append(ConfigError("correction.weight_high", None, POSITIVE, f"{weight.name} needs it"))
    if weight is Weight.token_icepop and low is None:
        problems.append(ConfigError("correction.weight_low", None, POSITIVE, f"{weight.name} needs it"))
    if not problems and low is not None and high is not None and not low < high:
        problems.append(ConfigError("correction.weight_low", low, f"less than correction.weight_high={high:g}"))
    return problems


def _mask_problems(correction: CorrectionConfig) -> list[ConfigError]:
    low, high, veto = correction.geo_low, correction.geo_high, correction.veto
    problems = []
    if (low is None) != (high is None):
        missing = "geo_low" if low is None else "geo_high"
        problems.append(ConfigError(f"correction.{missing}", None, POSITIVE, "the geometric mask has two bounds"))
    if low is not None and not 0 < low <= 1:
        problems.append(ConfigError("correction.geo_low", low, "a number > 0, at most 1"))
    if high is not None and not 1 <= high < math.inf:
        problems.append(ConfigError("correction.geo_high", high, "a number from 1 on"))
    if veto is not None and not 0 < veto < 1:
        problems.append(ConfigError("correction.veto", veto, "a number between 0 and 1"))
    return problems
