"""The trainer's log-probability pass: against plain forward passes, across dtypes, batch shapes and kinds of heads."""

import pytest
import torch
from models import Family, checkpoint
from steps import policy, runner, step_batch, token_batch
from torch import Tensor

from grpo_exp import assets, kernels
from grpo_exp.config.schema import AlgoConfig, CorrectionConfig, Normalization, PrecisionConfig, Proximal
from grpo_exp.errors import ConfigError
from grpo_exp.policy import Policy
from grpo_exp.token_batch import RowBatch

TINY = assets.path("tiny")
FP32, BF16 = torch.float32, torch.bfloat16


@torch.no_grad()
def plain_logprobs(policy: Policy, batch: RowBatch, temperature: float) -> tuple[Tensor, Tensor]:
    """What the model's own forward pass says, all logits at once."""
    logits = policy.model(input_ids=batch.input_ids).logits[batch.rows, batch.positions - 1]
    log_p = (logits.double() / temperature).log_softmax(-1)
    return log_p[torch.arange(len(batch.tokens)), batch.tokens], -(log_p.exp() * log_p).sum(-1)


@torch.no_grad()
def logprobs(path: object, precision: str | PrecisionConfig, batch: RowBatch) -> Tensor:
    return policy(path, precision).logprobs(batch, 1.0)[0]


def gradient(policy: Policy) -> Tensor:
    """All gradients of a model as one vector."""
    return torch.cat([p.grad.flatten() for p in policy.model.parameters() if p.grad is not None])


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_fp32_equals_a_plain_fp32_forward_pass(temperature: float):
    ours, batch = policy(TINY, chunk=100), token_batch(32)
    with torch.no_grad():
        found, entropy = ours.logprobs(batch, temperature)
    expected, expected_entropy = plain_logprobs(ours, batch, temperature)
    assert found.dtype == entropy.dtype == FP32
    assert float((found - expected).abs().max()) < 5e-6
    assert float((found - expected).abs().mean()) < 1e-6
    assert float((entropy - expected_entropy).abs().max()) < 5e-6


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("seed", [0, 1])
def test_bf16_is_off_by_eight_times_as_much_as_fp16(seed: int, native: bool, monkeypatch: pytest.MonkeyPatch):
    """Their formats differ by three bits. 2048 tokens, since the errors have long tails; with torch's kernels and ours."""
    if native:
        monkeypatch.setattr(kernels, "has_native_matmul", lambda dtype, device: True)
    batch = token_batch(256, seed=seed)
    exact = logprobs(TINY, "fp32", batch)
    off = {option: float((logprobs(TINY, option, batch) - exact).abs().mean()) for option in ("bf16", "fp16")}
    assert off["fp16"] > 1e-4
    assert 5 < off["bf16"] / off["fp16"] < 12


@pytest.mark.parametrize("family", [Family.llama, Family.qwen3])
def test_scoring_one_row_at_a_time_changes_nothing_in_fp32(family: Family):
    """B14: micro-batches of 1 and of 8 agree within 1e-5, also where shorter rows are padded."""
    scorer, batch = policy(checkpoint(family)), token_batch(8)
    width = batch.input_ids.shape[1]
    lengths = torch.tensor([width, 9, 10, 11, 12, 13, 14, 15])
    inside = batch.positions < lengths[batch.rows]
    padded = RowBatch(
        batch.input_ids * (torch.arange(width) < lengths[:, None]), batch.rows[inside], batch.positions[inside]
    )
    with torch.no_grad():
        together, _ = scorer.logprobs(padded, 1.0)
        alone = []
        for row in range(8):
            mine = padded.rows == row
            cut = padded.input_ids[row : row + 1, : lengths[row]]
            alone.append(scorer.logprobs(RowBatch(cut, padded.rows[mine] * 0, padded.positions[mine]), 1.0)[0])
    assert float((together - torch.cat(alone)).abs().max()) < 1e-5


@pytest.mark.parametrize("normalization", list(Normalization))
def test_the_gradient_of_a_step_does_not_depend_on_its_micro_batches(normalization: Normalization):
    """C6: through the very passes of the trainer."""
    algo = AlgoConfig(group_size=4, normalization=normalization)
    found = {}
    for budget in (1, 24, 60, 4096):
        scorer, batch = policy(checkpoint(Family.llama, tied=False)), step_batch(budget, algo)
        passes = runner(scorer, algo).run(batch, scale=1.0)
        found[len(batch.micro_batches)] = (passes.loss, gradient(scorer))
    assert len(found) == 4, "four different cuts"
    whole_loss, whole = found.pop(1)
    assert float(whole.norm()) > 1e-2
    for loss, cut in found.values():
        assert float((cut - whole).norm() / whole.norm()) < 1e-6
        assert loss == pytest.approx(whole_loss, abs=1e-6)


def test_a_loss_scale_multiplies_the_gradient_and_not_the_loss():
    plain, scaled = policy(TINY), policy(TINY)
    loss = runner(plain).run(step_batch(), scale=1.0).loss
    assert runner(scaled).run(step_batch(), scale=1024.0).loss == loss
    assert torch.equal(gradient(scaled), gradient(plain) * 1024.0)


def test_old_logprobs_are_those_of_this_pass_or_of_the_rollout():
    correction = CorrectionConfig(proximal=Proximal.recompute)
    passes = runner(policy(TINY), correction=correction).run(step_batch(), scale=1.0)
    assert bool((passes.ratio == 1.0).all())
    passes = runner(policy(TINY)).run(step_batch(), scale=1.0)
    torch.testing.assert_close(passes.ratio, (passes.new - passes.mu).exp())


def test_a_soft_cap_is_part_of_the_log_probabilities():
    """The fallback: a model whose logits are more than a linear head runs its own forward pass."""
    capped, batch = policy(checkpoint(Family.gemma2)), token_batch(16, prompt=12)
    assert capped.head is None
    with torch.no_grad():
        found, entropy = capped.logprobs(batch, 0.7)
    expected, expected_entropy = plain_logprobs(capped, batch, 0.7)
    assert float((found - expected).abs().max()) < 5e-6
    assert float((entropy - expected_entropy).abs().max()) < 5e-6
    with torch.no_grad():
        hidden = capped.hidden_states(batch.input_ids)[batch.rows, batch.positions - 1]
        uncapped = (hidden @ capped.model.lm_head.weight.T / 0.7).log_softmax(-1).gather(-1, batch.tokens[:, None])
    assert float((uncapped[:, 0] - expected).abs().max()) > 0.1, "the cap makes a difference here"


def test_a_soft_cap_computes_and_trains_in_the_compute_dtype():
    capped = policy(checkpoint(Family.gemma2), "bf16")
    passes = runner(capped).run(step_batch(), scale=1.0)
    assert (capped.logits_dtype, passes.new.dtype) == (BF16, FP32)
    assert float(gradient(capped).norm()) > 0


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (PrecisionConfig(params="bf16", head="fp32"), r"precision\.head='fp32': allowed: bf16 \(the head of Gemma2"),
        (PrecisionConfig(params="bf16", rollout_head="fp32"), r"precision\.rollout_head='fp32': allowed: bf16"),
    ],
)
def test_a_soft_cap_refuses_a_head_in_a_dtype_of_its_own(config: PrecisionConfig, message: str):
    with pytest.raises(ConfigError, match=message):
        policy(checkpoint(Family.gemma2), config)


@pytest.mark.parametrize("family", [Family.llama, Family.qwen3])
def test_an_fp32_head_over_a_tied_bf16_model_leaves_the_embedding_alone(family: Family):
    """A14: the head is cast on the fly; the tie and the embedding's dtype stay."""
    model = policy(checkpoint(family), PrecisionConfig(params="bf16", head="fp32"))
    passes = runner(model).run(step_batch(), scale=1.0)
    embedding, head = model.model.get_input_embeddings().weight, model.model.get_output_embeddings().weight
    assert head is embedding
    assert embedding.dtype == BF16
    assert embedding.grad is not None
    assert embedding.grad.dtype == BF16
    assert (model.logits_dtype, passes.new.dtype) == (FP32, FP32)
    batch = token_batch(64)
    exact, with_head, without = (
        logprobs(checkpoint(family), config, batch)
        for config in (PrecisionConfig(params="fp32"), PrecisionConfig(params="bf16", head="fp32"), "bf16_pure")
    )
    assert float((with_head - exact).abs().mean()) < float((without - exact).abs().mean())


@pytest.mark.parametrize(("option", "off"), [("bf16", 0.05), ("fp16", 0.006)])
def test_16_bit_compute_over_fp32_masters_gives_fp32_gradients(option: str, off: float):
    """Close to the exact ones where nothing is clipped, as a ratio beyond the clip in one and not in the other would be."""
    correction = CorrectionConfig(proximal=Proximal.recompute)
    lowered, exact = policy(TINY, option), policy(TINY, "fp32")
    for scorer in (lowered, exact):
        runner(scorer, correction=correction).run(step_batch(), scale=1.0)
        assert {p.grad.dtype for p in scorer.model.parameters()} == {FP32}
    assert 0 < float((gradient(lowered) - gradient(exact)).norm() / gradient(exact).norm()) < off
