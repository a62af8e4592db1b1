"""The loss of a step against TRL's own GRPOTrainer, for the variants that both have: same batch, same weights.

Needs the extra ``bench`` (TRL 1.16): ``pytest -m bench tests/test_trl_loss.py``. What the two define differently is listed in
docs/algorithm.md and stated here by other settings.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from steps import groups, policy
from torch import Tensor

from grpo_exp.batch import StepBatch, build_batch
from grpo_exp.config.schema import AlgoConfig, CorrectionConfig, Loss, Normalization
from grpo_exp.passes import PassRunner
from grpo_exp.policy import Policy
from grpo_exp.weights import Reference

pytestmark = [pytest.mark.bench, pytest.mark.filterwarnings("ignore")]  # TRL's own warnings

TINY = Path(__file__).resolve().parents[1] / "grpo_exp" / "assets" / "tiny"
MAX_TOKENS = 10
TOKEN_MEAN = Normalization.token_mean
PLAIN = AlgoConfig(group_size=4, clip_low=0.2, clip_high=0.28)


@dataclass(frozen=True)
class Variant:
    """The settings of one variant on both sides."""

    ours: AlgoConfig
    theirs: dict[str, Any] = field(default_factory=dict)


VARIANTS = {
    "grpo": Variant(PLAIN, {"loss_type": "grpo"}),
    "dapo": Variant(replace(PLAIN, normalization=TOKEN_MEAN), {"loss_type": "dapo"}),
    "dr_grpo": Variant(replace(PLAIN, normalization=Normalization.constant), {"loss_type": "dr_grpo"}),
    "gspo": Variant(replace(PLAIN, loss=Loss.gspo), {"loss_type": "grpo", "importance_sampling_level": "sequence"}),
    "cispo": Variant(
        replace(PLAIN, loss=Loss.cispo, normalization=TOKEN_MEAN, clip_high=0.5),
        {"loss_type": "cispo", "epsilon_high": 1.5},  # the bound of the ratio, not what it is above 1
    ),
    "dual_clip": Variant(replace(PLAIN, dual_clip=1.5), {"loss_type": "grpo", "delta": 1.5}),
    "kl": Variant(replace(PLAIN, kl_coef=0.3), {"loss_type": "grpo", "beta": 0.3, "use_bias_correction_kl": False}),
    "entropy": Variant(
        replace(PLAIN, normalization=TOKEN_MEAN, entropy_coef=0.2), {"loss_type": "dapo", "entropy_coef": 0.2}
    ),
}


def padded(rows: list[Any], left: bool = False) -> tuple[Tensor, Tensor]:
    """Rows of numbers side by side, and their mask."""
    width = max(map(len, rows))
    values, mask = np.zeros((len(rows), width), np.asarray(rows[0]).dtype), np.zeros((len(rows), width), np.int64)
    for line, row in enumerate(rows):
        place = slice(width - len(row), None) if left else slice(len(row))
        values[line, place], mask[line, place] = row, 1
    return torch.from_numpy(values), torch.from_numpy(mask)


def make_batch(scorer: Policy, algo: AlgoConfig) -> StepBatch:
    """Completions whose ``mu`` is near the policy, on both sides of every clip."""
    some = groups()
    with torch.no_grad():
        batch = build_batch(some, algo, MAX_TOKENS, 10**6, scorer.device)
        [part] = batch.micro_batches
        new = scorer.logprobs(part.tokens, 1.0)[0]
    noise = torch.randn(len(new), generator=torch.Generator().manual_seed(1))
    mu = dict(zip(zip(part.sequence.tolist(), part.position.tolist(), strict=True), new + 0.4 * noise, strict=True))
    rollouts = [rollout for group in some for rollout in group.rollouts]
    for index, rollout in enumerate(rollouts):
        rollout.mu[:] = [float(mu[index, position]) for position in range(len(rollout.mu))]
    return build_batch(some, algo, MAX_TOKENS, 10**6, scorer.device)


def theirs(variant: Variant, scorer: Policy, batch: StepBatch, reference: Tensor | None, tmp_path: Path) -> float:
    """TRL's loss, with its gradient in the model's parameters."""
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    settings: dict[str, Any] = {"epsilon": 0.2, "epsilon_high": 0.28, "beta": 0.0} | variant.theirs
    args = GRPOConfig(
        output_dir=str(tmp_path), use_cpu=True, bf16=False, per_device_train_batch_size=16, num_generations=4,
        max_completion_length=MAX_TOKENS, temperature=1.0, gradient_checkpointing=False, report_to="none", **settings,
    )  # fmt: skip
    trainer = GRPOTrainer(
        model=scorer.model, reward_funcs=lambda completions, **_: [0.0] * len(completions), args=args,
        train_dataset=Dataset.from_list([{"prompt": "a"}] * 16), processing_class=AutoTokenizer.from_pretrained(TINY),
    )  # fmt: skip
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    rollouts = batch.rollouts
    prompts, prompt_mask = padded([group.prompt_ids for group in batch.groups for _ in group.rollouts], left=True)
    completions, mask = padded([rollout.token_ids for rollout in rollouts])
    inputs = {
        "prompt_ids": prompts, "prompt_mask": prompt_mask, "completion_ids": completions, "completion_mask": mask,
        "advantages": batch.advantages.values.flatten(), "num_items_in_batch": mask.sum(),
        "old_per_token_logps": padded([rollout.mu for rollout in rollouts])[0],
    }  # fmt: skip
    if reference is not None:
        inputs["ref_per_token_logps"] = reference
    loss = trainer._compute_loss(trainer.model, inputs)
    loss.backward()
    return float(loss.detach())


def gradient(scorer: Policy) -> Tensor:
    return torch.cat([p.grad.flatten() for p in scorer.model.parameters() if p.grad is not None])


@pytest.mark.parametrize("name", VARIANTS)
def test_loss_and_gradient_are_those_of_trl(name: str, tmp_path: Path) -> None:
    pytest.importorskip("trl")
    variant = VARIANTS[name]
    scorer = policy(TINY)
    batch = make_batch(scorer, variant.ours)
    reference = scored = None
    if variant.ours.kl_coef:
        reference = Reference(scorer, 1.0)
        reference.weights = [weight * 1.01 for weight in reference.weights]
        [part] = batch.micro_batches
        values = reference.logprobs(part.tokens)
        scored = torch.zeros(len(batch.rollouts), int(part.position.max()) + 1)
        scored[part.sequence, part.position] = values
    runner = PassRunner(scorer, variant.ours, CorrectionConfig(), 1.0, reference)
    passes = runner.run(runner.prepare(batch), 1.0)
    ours = gradient(scorer)
    for parameter in scorer.model.parameters():
        parameter.grad = None
    expected = theirs(variant, scorer, batch, scored, tmp_path)
    assert passes.clipped.any(), "or the clip would not be compared"
    assert passes.loss + passes.kl_loss + passes.entropy_loss == pytest.approx(expected, rel=1e-5, abs=1e-5)
    assert (ours - gradient(scorer)).abs().max() <= 1e-5 * ours.norm()
