"""Which settings of the algorithm can be used, and which go together. Imports no torch.

A setting that would do nothing is refused as much as one that is wrong, so that what a configuration says about the
algorithm is what the run did.
"""

import math
from collections.abc import Iterator

from ..errors import ConfigError
from .schema import AlgoConfig, Backend, Config, KlEstimator, Loss, Proximal


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
    for name in ("kl_coef", "entropy_coef"):
        if not 0 <= getattr(algo, name) < math.inf:
            yield ConfigError(f"algo.{name}", getattr(algo, name), "0 or more")
    for name in ("epochs", "mini_batches"):
        if not getattr(algo, name) >= 1:
            yield ConfigError(f"algo.{name}", getattr(algo, name), "1 or more")
    if algo.kl_coef == 0 and algo.kl_estimator is not KlEstimator.k3:
        yield ConfigError("algo.kl_estimator", algo.kl_estimator.name, "k3", "algo.kl_coef=0: there is no KL")
    if algo.dual_clip is not None and not algo.dual_clip > 1:
        yield ConfigError("algo.dual_clip", algo.dual_clip, "null, or a number > 1")
    elif algo.dual_clip is not None and algo.loss is not Loss.ppo_clip:
        reason = "it bounds PPO's loss of a negative advantage; no other loss has that term"
        yield ConfigError("algo.dual_clip", algo.dual_clip, f"null with algo.loss={algo.loss.name}", reason)


def _combination_problems(config: Config) -> Iterator[ConfigError]:
    algo, prompts = config.algo, config.trainer.prompts_per_step
    if algo.mini_batches >= 1 and prompts >= 1 and prompts % algo.mini_batches:
        reason = f"trainer.prompts_per_step={prompts} groups are shared out evenly"
        yield ConfigError("algo.mini_batches", algo.mini_batches, f"a divisor of {prompts}", reason)
    if algo.num_updates > 1 and config.rollout.backend is Backend.replay:
        key = "epochs" if algo.epochs > 1 else "mini_batches"
        reason = "a replay compares one gradient a step"
        yield ConfigError(f"algo.{key}", getattr(algo, key), "1", reason)
    if algo.kl_coef == 0 and config.precision.reference is not None:
        yield ConfigError(
            "precision.reference", config.precision.reference, "null", "algo.kl_coef=0: no reference is held"
        )
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
