"""Dynamic sampling: groups that teach nothing are replaced, within a bound, and no prompt is lost or comes twice for it."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engines import completed
from hypothesis import given
from hypothesis import strategies as st
from small_runs import LOCKSTEP, check_groups, events, metrics, repeatable, small_trainer, status
from steps import CPU, groups
from test_resume import At, Crash, crash
from test_source import make_source, serials

from grpo_exp import jsonl
from grpo_exp.algo.advantage import group_advantages, overlong_penalty
from grpo_exp.batch import build_batch
from grpo_exp.config.schema import AlgoConfig
from grpo_exp.rollout.types import Generated, Request

ON = "algo.dynamic_sampling=true"


def equal_for_even(request: Request, version: int) -> Generated:
    """Completions of serials 0, 2, … have the same length, which is all that is rewarded; the others have not."""
    answer = completed(request, version)
    return answer if request.serial % 2 == 0 else one_shorter(answer)


def one_shorter(answer: Generated) -> Generated:
    first, *rest = answer.rollouts
    first = first._replace(token_ids=first.token_ids[1:], mu=first.mu[1:], versions=first.versions[1:])
    return replace(answer, rollouts=[first, *rest])


def test_groups_with_equal_rewards_are_not_counted_towards_a_batch_and_others_take_their_places() -> None:
    source, found = make_source(equal_for_even, ON)
    batches = [source.next_batch(None) for _ in range(3)]
    trained = [serial for batch in batches for serial in serials(batch)]
    replaced = [event["group"] for event in found if event["event"] == "replaced_group"]
    assert len(trained) == 6
    assert all(serial % 2 == 1 for serial in trained)
    assert replaced
    assert all(serial % 2 == 0 for serial in replaced)
    assert source.buffer.counts.replaced == len(replaced)
    used = [*trained, *replaced, *source.buffer.serials()]
    assert sorted(used) == list(range(source.stream.cursor)), "every serial has exactly one end"


def test_where_nothing_can_be_learnt_a_step_is_made_of_what_there_is() -> None:
    source, _ = make_source(completed, ON, "algo.max_replaced=3", "rollout.max_staleness=0")
    for step in (1, 2):
        assert len(source.next_batch(None) or []) == 2
        assert source.buffer.counts.replaced == step * 3 * 2


def test_without_it_groups_with_equal_rewards_are_trained() -> None:
    source, _ = make_source(equal_for_even)
    assert serials(source.next_batch(None)) == [0, 1]
    assert source.buffer.counts.replaced == 0


def test_a_broken_run_replaces_and_trains_what_the_unbroken_one_does(tmp_path: Path) -> None:
    overrides = ("task=shortest", LOCKSTEP, ON, "trainer.save_every=1", "trainer.eval_every=0", "trainer.max_steps=3")
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    small_trainer(whole, *overrides).train()
    assert status(whole)["groups"]["replaced"] > 0
    with pytest.raises(Crash):
        small_trainer(broken, *overrides, callbacks=[At(2, crash)]).train()
    small_trainer(broken, *overrides).train(resume_from_checkpoint=True)
    assert repeatable(metrics(whole)) == repeatable(metrics(broken))
    assert jsonl.read(whole / "trained.jsonl") == jsonl.read(broken / "trained.jsonl")
    assert status(whole)["groups"] == status(broken)["groups"]
    replaced = [{row["group"] for row in events(path, "replaced_group")} for path in (whole, broken)]
    assert replaced[0] == replaced[1]
    rows = [row for row in metrics(whole) if row["step"]]
    assert sum(row["group/replaced"] for row in rows) == status(whole)["groups"]["replaced"]
    assert all(row["group/zero_std_frac"] == 0 for row in rows)


def test_an_epoch_uses_every_prompt_once_whether_it_is_trained_or_replaced(tmp_path: Path) -> None:
    trainer = small_trainer(
        tmp_path, "task=shortest", LOCKSTEP, ON, "trainer.max_epochs=1", "trainer.max_steps=null", "task.num_train=32",
        "trainer.eval_every=0",
    )  # fmt: skip
    trainer.train()
    trained = [serial for row in jsonl.read(tmp_path / "trained.jsonl") for serial in row["groups"]]
    replaced = [row["group"] for row in events(tmp_path, "replaced_group")]
    assert sorted([*trained, *replaced]) == list(range(32))
    assert 0 < len(replaced) < 32
    check_groups(tmp_path)


@given(length=st.integers(1, 20), overlong=st.integers(0, 20), penalty=st.floats(0.1, 2.0), limit=st.just(20))
def test_the_punishment_of_length_equals_the_written_out_formula(
    length: int, overlong: int, penalty: float, limit: int
) -> None:
    """arXiv 2503.14476, equation 13, with its bound on the length at the bound of the completion."""
    if length <= limit - overlong:
        expected = 0.0
    else:
        expected = penalty * ((limit - overlong) - length) / overlong
    found = overlong_penalty(torch.tensor([length]), limit, overlong, penalty)
    assert found.item() == pytest.approx(expected, rel=1e-6)


def test_a_punished_reward_makes_the_advantage_and_the_reward_that_is_logged_is_the_task_s() -> None:
    algo = AlgoConfig(group_size=4, overlong_tokens=4, overlong_penalty=0.5)
    batch = groups()
    for group in batch:
        group.rewards = [1.0] * 4
    step = build_batch(batch, algo, 10, 4096, CPU)
    assert step.rewards.eq(1.0).all()
    lengths = torch.tensor([[len(rollout.token_ids) for rollout in group.rollouts] for group in batch])
    rewards = 1 - 0.5 * ((lengths - 6).clamp(min=0) / 4)
    expected = group_advantages(rewards, algo.advantage, algo.advantage_eps)
    torch.testing.assert_close(step.advantages.values, expected.values)
    assert not step.advantages.zero_std.all()
