"""Which settings of the algorithm can be used, and which go together. Imports no torch.

A setting that would do nothing is refused as much as one that is wrong, so that what a configuration says about the
algorithm is what the run did.
"""

import math
from collections.abc import Iterator

from ..errors import ConfigError
from .schema import AlgoConfig, Backend, Config, Loss, Proximal


def algo_problems(config: Config) -> list[ConfigError]:
    """Every problem of the group ``algo``, alone and with the group ``correction``."""
    return [*_value_problems(config.algo), *_combination_problems(config)]


def _value_problems(algo: AlgoConfig) -> Iterator[ConfigError]:
    if algo.group_size < 2:
        reason = "an advantage compares completions of one prompt"
        yield ConfigError("algo.group_size", algo.group_size, "2 or more", reason)
    if not 0 < algo.clip_low < 1:
        yield ConfigError("algo.clip_low", algo.clip_low, "a number between 0 and 1")
    if not algo.clip_high > 0:
        yield ConfigError("algo.clip_high", algo.clip_high, "a number > 0")
    if not algo.overlong_tokens >= 0:
        yield ConfigError("algo.overlong_tokens", algo.overlong_tokens, "0 or more")
    if not 0 < algo.overlong_penalty < math.inf:
        yield ConfigError("algo.overlong_penalty", algo.overlong_penalty, "a number > 0")
    if not algo.max_replaced >= 1:
        yield ConfigError("algo.max_replaced", algo.max_replaced, "1 or more")
    if algo.dual_clip is not None and not algo.dual_clip > 1:
        yield ConfigError("algo.dual_clip", algo.dual_clip, "null, or a number > 1")
    elif algo.dual_clip is not None and algo.loss is not Loss.ppo_clip:
        reason = "it bounds PPO's loss of a negative advantage; no other loss has that term"
        yield ConfigError("algo.dual_clip", algo.dual_clip, f"null with algo.loss={algo.loss.name}", reason)


def _combination_problems(config: Config) -> Iterator[ConfigError]:
    longest = config.task.max_completion_tokens
    if config.algo.overlong_tokens > longest:
        reason = "no completion is longer"
        yield ConfigError("algo.overlong_tokens", config.algo.overlong_tokens, f"0 to {longest}", reason)
    if config.algo.dynamic_sampling and config.rollout.backend is Backend.replay:
        reason = "what was recorded has no other groups; those that were replaced then are not in it"
        yield ConfigError("algo.dynamic_sampling", True, "false", reason)
    if config.algo.loss is Loss.dppo_tv and config.correction.proximal is Proximal.beta_removal:
        reason = "algo.loss=dppo_tv keeps tokens by p_new - p_mu, which holds beta whatever the ratio is made of"
        yield ConfigError("correction.proximal", Proximal.beta_removal.name, "rollout, recompute, interpolate", reason)
