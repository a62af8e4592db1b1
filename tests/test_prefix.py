"""The prompt of a group forwarded once: the same numbers as whole rows give, for fewer tokens; and who falls back."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import Family, checkpoint
from steps import CPU, groups, policy
from torch import Tensor

from grpo_exp import assets
from grpo_exp.batch import StepBatch, build_batch
from grpo_exp.config.schema import AlgoConfig, CorrectionConfig
from grpo_exp.passes import PassRunner
from grpo_exp.policy import Policy
from grpo_exp.prefix import shared_states
from grpo_exp.rollout.types import Group
from grpo_exp.token_batch import Completion, RowBatch, SharedBatch, cut_groups, cut_rows

ALGO = AlgoConfig(group_size=4)


def batch_of(made: list[Group], share: bool, budget: int = 4096, algo: AlgoConfig = ALGO) -> StepBatch:
    return build_batch(made, algo, 10, budget, CPU, share_prompts=share)


def in_order(batch: StepBatch, values: Tensor) -> Tensor:
    """Per-token values of a step in the order of its sequences."""
    sequence = torch.cat([micro_batch.sequence for micro_batch in batch.micro_batches])
    return values[sequence.sort(stable=True).indices]


def passes(scorer: Policy, batch: StepBatch) -> tuple[Tensor, Tensor]:
    """Log-probs of all tokens and the gradient of the step."""
    scorer.model.zero_grad()
    seen = PassRunner(scorer, ALGO, CorrectionConfig(), 0.7).run(batch, scale=1.0)
    gradient = torch.cat([p.grad.flatten() for p in scorer.model.parameters() if p.grad is not None])
    return in_order(batch, seen.new), gradient


def shared(batch: StepBatch) -> set[type]:
    return {type(micro_batch.tokens) for micro_batch in batch.micro_batches}


@pytest.mark.parametrize("family", [Family.llama, Family.qwen3])
@pytest.mark.parametrize("budget", [4096, 60])
@pytest.mark.parametrize("seed", range(3))
def test_values_and_gradients_are_those_of_whole_rows(family: Family, budget: int, seed: int):
    """Prompts of unequal lengths, so padded ones; groups cut apart where the budget is small."""
    scorer, made = policy(checkpoint(family, tied=False)), groups(6, 4, seed)
    sharing, plain = batch_of(made, True, budget), batch_of(made, False, budget)
    assert SharedBatch in shared(sharing)
    assert shared(plain) == {RowBatch}
    (found, found_gradient), (expected, gradient) = passes(scorer, sharing), passes(scorer, plain)
    assert float((found - expected).abs().mean()) < 1e-6
    assert float((found - expected).abs().max()) < 5e-6
    assert float((found_gradient - gradient).norm() / gradient.norm()) < 3e-6  # both are that far from float64


@pytest.mark.parametrize("family", [Family.llama, Family.qwen3])
def test_in_float64_states_and_gradients_agree_up_to_the_norms_that_the_model_keeps_in_fp32(family: Family):
    model = policy(checkpoint(family)).model.double()
    sharing, plain = batch_of(groups(6, 4), True), batch_of(groups(6, 4), False)
    weights = torch.randn(plain.num_tokens, model.config.hidden_size, dtype=torch.float64)
    found = []
    for batch in (sharing, plain):
        states = []
        for micro_batch in batch.micro_batches:
            match micro_batch.tokens:
                case SharedBatch() as tokens:
                    states.append(shared_states(model, model.base_model, tokens))
                case RowBatch() as tokens:
                    hidden = model.base_model(input_ids=tokens.input_ids).last_hidden_state
                    states.append(hidden[tokens.rows, tokens.positions - 1])
        joined = in_order(batch, torch.cat(states))
        model.zero_grad()
        (joined * weights).sum().backward()
        gradient = torch.cat([p.grad.flatten() for p in model.base_model.parameters()])
        found.append((joined.detach(), gradient))
    for ours, expected in zip(*found, strict=True):
        assert float((ours - expected).norm() / expected.norm()) < 5e-7


def test_the_shipped_model_shares_prompts_of_equal_length():
    scorer, made = policy(assets.path("tiny")), groups(8, 8)
    for group in made:
        group.prompt_ids[:] = (group.prompt_ids * 8)[:8]
    sharing = batch_of(made, True)
    assert isinstance(tokens := sharing.micro_batches[0].tokens, SharedBatch)
    assert (tokens.copies, tokens.prompt_mask) == (8, None)
    (found, found_gradient), (expected, gradient) = passes(scorer, sharing), passes(scorer, batch_of(made, False))
    assert float((found - expected).abs().mean()) < 1e-6
    assert float((found_gradient - gradient).norm() / gradient.norm()) < 2e-6  # both are that far from float64


@pytest.mark.parametrize("precision", ["bf16", "fp16", "bf16_pure"])
def test_in_16_bits_sharing_stays_within_the_rounding_of_the_dtype(precision: str):
    scorer, exact, made = policy(checkpoint(), precision), policy(checkpoint()), groups(6, 4)
    plain, sharing = batch_of(made, False), batch_of(made, True)
    expected, _ = passes(exact, plain)
    found, _ = passes(scorer, sharing)
    rows, _ = passes(scorer, plain)
    assert 0.0 < float((found - expected).abs().mean()) < 2.0 * float((rows - expected).abs().mean())


def test_sliding_windows_forward_whole_rows():
    assert not policy(checkpoint(Family.gemma2)).shares_prompts
    assert policy(checkpoint(Family.llama)).shares_prompts


def test_a_prompt_of_one_completion_is_not_worth_a_pass_of_its_own():
    made = groups(3, 4)
    for group in made:
        group.rollouts, group.rewards = group.rollouts[:1], group.rewards[:1]
    assert shared(batch_of(made, True)) == {RowBatch}


shapes = st.lists(
    st.tuples(st.integers(1, 30), st.lists(st.integers(1, 30), min_size=1, max_size=6)), min_size=1, max_size=8
)


@given(shapes, st.integers(1, 300))
@settings(deadline=None)
def test_a_cut_holds_every_row_once_within_the_budget(groups: list[tuple[int, list[int]]], budget: int):
    made = [Completion(g, [1] * prompt, [2] * n) for g, (prompt, lengths) in enumerate(groups) for n in lengths]
    for cut, build in ((cut_rows, RowBatch.build), (cut_groups, SharedBatch.build)):
        found = cut(made, range(len(made)), budget)
        assert sorted(row for part in found.parts for row in part) == list(range(len(made)))
        sizes = []
        for part in found.parts:
            tokens = build([made[row] for row in part], CPU)
            ids = [tokens.input_ids] if isinstance(tokens, RowBatch) else [tokens.prompts, tokens.completions]
            sizes.append(sum(tensor.numel() for tensor in ids))
            assert len(part) == 1 or sizes[-1] <= budget
            assert tokens.tokens.tolist() == [2] * sum(len(made[row].token_ids) for row in part)
        assert sum(sizes) == found.num_tokens
