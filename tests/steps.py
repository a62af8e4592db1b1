"""One optimizer step's worth of groups for a tiny model, made by hand: no generator, no run."""

import numpy as np
import torch

from grpo_exp.batch import StepBatch, build_batch
from grpo_exp.config.compose import load_precision
from grpo_exp.config.schema import AlgoConfig, CorrectionConfig, PrecisionConfig
from grpo_exp.passes import PassRunner
from grpo_exp.policy import Policy, load_policy
from grpo_exp.precision import resolve
from grpo_exp.rollout.types import Group, Rollout
from grpo_exp.token_batch import RowBatch

CPU = torch.device("cpu")


def token_batch(rows: int, prompt: int = 8, completion: int = 8, seed: int = 0) -> RowBatch:
    """Random letters; the last ``completion`` positions of each row are scored."""
    ids = torch.randint(4, 64, (rows, prompt + completion), generator=torch.Generator().manual_seed(seed))
    positions = torch.arange(prompt, prompt + completion)
    return RowBatch(ids, torch.arange(rows).repeat_interleave(completion), positions.repeat(rows))


def policy(path: object, precision: str | PrecisionConfig = "fp32", chunk: int = 1024) -> Policy:
    config = load_precision(precision) if isinstance(precision, str) else precision
    resolved = resolve(config, "fp32", CPU, optim_eps=1e-4)
    return Policy(load_policy(str(path), None, resolved.params), resolved, chunk)


def groups(num_groups: int = 4, size: int = 4, seed: int = 0) -> list[Group]:
    """Prompts and completions of many lengths, with rewards that differ and a ``mu`` of a somewhat other policy."""
    rng = np.random.default_rng(seed)
    return [
        Group(
            serial=serial,
            prompt_ids=rng.integers(4, 64, rng.integers(2, 12)).tolist(),
            row={},
            rollouts=[
                Rollout(
                    token_ids=rng.integers(4, 64, length).tolist(),
                    mu=rng.normal(-4.0, 0.5, length).astype(np.float32),
                    versions=np.zeros(length, dtype=np.int32),
                    finished=True,
                )
                for length in rng.integers(1, 10, size)
            ],
            version=0,
            rewards=rng.normal(size=size).tolist(),
        )
        for serial in range(num_groups)
    ]


def step_batch(tokens_per_micro_batch: int = 4096, algo: AlgoConfig | None = None, seed: int = 0) -> StepBatch:
    return build_batch(groups(seed=seed), algo or AlgoConfig(group_size=4), 10, tokens_per_micro_batch, CPU)


def runner(policy: Policy, algo: AlgoConfig | None = None, correction: CorrectionConfig | None = None) -> PassRunner:
    return PassRunner(policy, algo or AlgoConfig(group_size=4), correction or CorrectionConfig(), 1.0)
