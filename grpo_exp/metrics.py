"""The metrics of one optimizer step: every key with its unit and formula, and the function that computes them.

``METRICS`` is the documented table: tests hold docs/metrics.md and the rows of real runs to it.
"""

import math
import resource
import sys
from dataclasses import dataclass

import torch
from torch import Tensor

from .algo.correction import Correction, correction_metrics
from .algo.mismatch import mismatch_metrics
from .algo.stats import completion_stats
from .batch import StepBatch
from .config.schema import AlgoConfig

METRICS: dict[str, tuple[str, str]] = {
    "reward/mean": ("reward", "mean over the completions of the step that have a reward"),
    "reward/std": ("reward", "population standard deviation over the same"),
    "eval/accuracy": ("share", "held-out prompts answered right, one completion each at the rollout temperature"),
    "eval/accuracy_greedy": ("share", "the same, greedy decoding"),
    "eval/reward": ("reward", "mean reward of the sampled held-out completions"),
    "loss/policy": ("1", "the policy loss that was minimised, normalised as algo.normalization says"),
    "loss/kl": ("1", "algo.kl_coef times the mean of the KL estimate, normalised likewise; 0 without a reference"),
    "loss/entropy": ("1", "-algo.entropy_coef times the mean of the entropy, normalised likewise"),
    "reference/kl": (
        "nats",
        "mean over tokens of the estimate of KL(policy || base checkpoint); null without a reference",
    ),
    "grad/norm": ("1", "L2 norm of the gradient after unscaling, before clipping; null where not finite"),
    "ratio/mean": ("1", "mean of exp(new - old) over tokens, unclipped"),
    "ratio/clip_frac": ("share", "tokens whose ratio is beyond the clip side that is active for the sign of A"),
    "mismatch/mean": ("nats", "mean of d_roll = old - mu over tokens, raw"),
    "mismatch/sd": ("nats", "population standard deviation of d_roll"),
    "mismatch/abs_mean": ("nats", "mean of |d_roll|"),
    "mismatch/abs_p95": ("nats", "95th percentile of |d_roll|"),
    "mismatch/abs_max": ("nats", "maximum of |d_roll|"),
    "mismatch/k1": ("nats", "mean of mu - old"),
    "mismatch/k3": ("nats", "mean of exp(d_roll) - 1 - d_roll"),
    "mismatch/ess": ("share", "(sum W)^2 / (N sum W^2), W = exp(sum of d_roll over a sequence)"),
    "mismatch/outside": ("share", "tokens with exp(d_roll) outside [0.9, 1.1]"),
    "mismatch/outside_clip": ("share", "tokens with exp(d_roll) outside [1 - algo.clip_low, 1 + algo.clip_high]"),
    "mismatch/seq_mean": ("nats", "mean over sequences of S, the sum of d_roll over a sequence"),
    "mismatch/seq_sd": ("nats", "population standard deviation of S"),
    "mismatch/seq_abs_max": ("nats", "maximum of |S|"),
    "mismatch/ppl_trainer": ("1", "exp(-mean of old over tokens)"),
    "mismatch/ppl_generator": ("1", "exp(-mean of mu over tokens)"),
    "mismatch/prob_pearson": ("1", "Pearson correlation of exp(mu) and exp(old) over tokens"),
    "mismatch/drift_slope": (
        "nats per 1000 tokens",
        "least-squares slope of the running sum of d_roll against position",
    ),
    "mismatch/prob_0_1": ("nats", "mean of |d_roll| over tokens with exp(mu) below .01"),
    "mismatch/prob_1_10": ("nats", "… from .01 to .1"),
    "mismatch/prob_10_50": ("nats", "… from .1 to .5"),
    "mismatch/prob_50_90": ("nats", "… from .5 to .9"),
    "mismatch/prob_90_100": ("nats", "… from .9 on"),
    "mismatch/lag_0": ("nats", "mean of |d_roll| over tokens with staleness 0: |beta|, as nothing but it is there"),
    "mismatch/lag_1": ("nats", "… with staleness 1"),
    "mismatch/lag_2": ("nats", "… with staleness 2"),
    "mismatch/lag_3up": ("nats", "… with staleness 3 or more"),
    "correction/raw_mean": ("1", "mean over tokens of the weight before any clamp, bound or mask"),
    "correction/raw_sd": ("1", "population standard deviation of the same"),
    "correction/raw_min": ("1", "minimum of the same"),
    "correction/raw_max": ("1", "maximum of the same"),
    "correction/weight_mean": ("1", "mean over tokens of the weight that was used, 0 where rejected"),
    "correction/weight_sd": ("1", "population standard deviation of the same"),
    "correction/weight_max": ("1", "maximum of the same"),
    "correction/ess": ("share", "(sum w)^2 / (n sum w^2) of the weights that were used, over tokens"),
    "correction/kept": ("share", "tokens that neither weight nor mask rejected"),
    "correction/kept_sequences": ("share", "sequences with such a token"),
    "correction/nonfinite": ("tokens", "raw weights that are NaN or beyond fp32"),
    "probe/alpha_mean": ("nats", "mean of alpha = trainer(t) - trainer(s) over the tokens of a probe"),
    "probe/alpha_sd": ("nats", "population standard deviation of the same"),
    "probe/alpha_abs_mean": ("nats", "mean of |alpha|"),
    "probe/beta_mean": ("nats", "mean of beta = trainer(s) - mu"),
    "probe/beta_sd": ("nats", "population standard deviation of the same"),
    "probe/beta_abs_mean": ("nats", "mean of |beta|"),
    "probe/beta_dtype_mean": ("nats", "mean of beta_dtype = trainer(s) - lowered"),
    "probe/beta_dtype_sd": ("nats", "population standard deviation of the same"),
    "probe/beta_dtype_abs_mean": ("nats", "mean of |beta_dtype|"),
    "probe/beta_batch_mean": ("nats", "mean of beta_batch = lowered - alone"),
    "probe/beta_batch_sd": ("nats", "population standard deviation of the same"),
    "probe/beta_batch_abs_mean": ("nats", "mean of |beta_batch|"),
    "probe/beta_engine_mean": ("nats", "mean of beta_engine = alone - mu"),
    "probe/beta_engine_sd": ("nats", "population standard deviation of the same"),
    "probe/beta_engine_abs_mean": ("nats", "mean of |beta_engine|"),
    "probe/total_mean": ("nats", "mean of d_tot = trainer(t) - mu = alpha + beta"),
    "probe/total_sd": ("nats", "population standard deviation of the same"),
    "probe/total_abs_mean": ("nats", "mean of |d_tot|"),
    "probe/phantom_clip": ("share", "tokens with exp(beta) beyond the clip side that is active for the sign of A"),
    "probe/advantage_corr": ("1", "Pearson correlation of beta and A over tokens; null where A is constant"),
    "probe/drift_slope": ("nats per 1000 tokens", "least-squares slope of the running sum of beta against position"),
    "probe/prob_0_1": ("nats", "mean of |beta| over tokens with exp(mu) below .01"),
    "probe/prob_1_10": ("nats", "… from .01 to .1"),
    "probe/prob_10_50": ("nats", "… from .1 to .5"),
    "probe/prob_50_90": ("nats", "… from .5 to .9"),
    "probe/prob_90_100": ("nats", "… from .9 on"),
    "probe/alpha_stale": ("nats", "an estimate: mean of d_roll over stale tokens of the step, less probe/beta_mean"),
    "probe/lag": ("versions", "t - s: 1, or 0 where the step was skipped"),
    "probe/tokens": ("tokens", "tokens of the probe"),
    "probe/share": ("share", "wall time of all probes so far over wall_s"),
    "staleness/mean": ("versions", "mean over tokens of trained version - version that sampled the token"),
    "staleness/max": ("versions", "maximum of the same"),
    "group/zero_std_frac": ("share", "groups whose rewards are all equal, of those with a baseline"),
    "group/dropped_frac": ("share", "groups of the step with fewer than two valid rewards"),
    "group/replaced": ("groups", "left out by dynamic sampling since the step before, as their rewards were all equal"),
    "completion/length_mean": ("tokens", "mean length of the completions of the step"),
    "completion/length_min": ("tokens", "shortest"),
    "completion/length_max": ("tokens", "longest"),
    "completion/terminated_length_mean": ("tokens", "mean length of those that ended by themselves"),
    "completion/truncated_frac": ("share", "completions that met max_completion_tokens"),
    "entropy/mean": ("nats", "mean entropy of the trainer's distribution at each sampled token"),
    "fp16/scale": ("1", "the loss scale that the step used; 1 without loss scaling"),
    "fp16/skipped_total": (
        "steps",
        "steps skipped so far, for a non-finite gradient or for want of valid rewards, in any dtype",
    ),
    "params/changed_frac": ("share", "parameters that have another value after the step, in their own dtype"),
    "perf/step_s": ("s", "wall time of the step, waiting included"),
    "perf/train_s": ("s", "of it: forward, backward and optimizer"),
    "perf/wait_s": ("s", "of it: waiting for groups"),
    "perf/sync_s": ("s", "of it: handing new weights to the workers"),
    "perf/rollout_tok_s": ("tokens/s", "tokens generated since the last step per second that engines were busy"),
    "perf/trained_tok_s": ("tokens/s", "completion tokens of the step over perf/step_s"),
    "memory/peak_bytes": ("bytes", "peak of the trainer: allocated on a GPU, resident set on a CPU"),
    "lr": ("1", "learning rate of the step"),
}
COLUMNS = ("step", "time", "wall_s", "samples", "tokens")


@dataclass
class Passes:
    """What the forward and backward passes of one step saw, per token, detached; lists over micro-batches."""

    loss: float
    kl_loss: float
    entropy_loss: float
    scale: float  # the loss scale that was used
    new: Tensor  # [n]
    old: Tensor  # [n]: under the weights at the start of the step
    mu: Tensor  # [n]
    ratio: Tensor  # [n]
    clipped: Tensor  # [n]
    entropy: Tensor  # [n]
    reference_kl: Tensor  # [n]: the estimate at each token, NaN without a reference
    sequence: Tensor  # [n]
    position: Tensor  # [n]
    staleness: Tensor  # [n]
    correction: Correction


def step_metrics(batch: StepBatch, passes: Passes, algo: AlgoConfig) -> dict[str, float]:
    """Everything that follows from the batch and the passes over it."""
    valid = batch.rewards[batch.rewards.isfinite()].double()  # float64: a mean over many rewards
    advantages = batch.advantages
    num_kept = int((~advantages.dropped).sum())
    lengths = torch.tensor([len(rollout.token_ids) for rollout in batch.rollouts])
    truncated = torch.tensor([not rollout.finished for rollout in batch.rollouts])
    mismatch = mismatch_metrics(passes.mu, passes.old, passes.sequence, passes.position, passes.staleness, algo.clip)
    correction = correction_metrics(passes.correction, passes.sequence)
    return {
        "reward/mean": float(valid.mean()) if len(valid) else math.nan,
        "reward/std": float(valid.std(correction=0)) if len(valid) else math.nan,
        "loss/policy": passes.loss,
        "loss/kl": passes.kl_loss,
        "loss/entropy": passes.entropy_loss,
        "reference/kl": _mean(passes.reference_kl),
        "ratio/mean": _mean(passes.ratio),
        "ratio/clip_frac": _mean(passes.clipped),
        "entropy/mean": _mean(passes.entropy),
        "group/zero_std_frac": int(advantages.zero_std.sum()) / num_kept if num_kept else math.nan,
        "group/dropped_frac": 1.0 - num_kept / len(batch.groups),
        "staleness/mean": _mean(passes.staleness),
        "staleness/max": float(passes.staleness.max()),
        **{f"completion/{key}": value for key, value in completion_stats(lengths, truncated).items()},
        **{f"mismatch/{key}": value for key, value in mismatch.items()},
        **{f"correction/{key}": value for key, value in correction.items()},
    }


def _mean(values: Tensor) -> float:
    return float(values.double().mean())  # float64: sums over many tokens


def peak_memory_bytes(device: torch.device) -> int:
    """Peak memory of this process since it started."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
