"""Every option of the group ``algo`` with every option of ``correction``: what goes together gives one gradient."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from steps import policy, step_batch
from torch import Tensor

from grpo_exp.checks import find_problems
from grpo_exp.config.compose import compose, to_typed
from grpo_exp.config.schema import Config
from grpo_exp.passes import PassRunner

ROOT = Path(__file__).resolve().parents[1]
TINY = ROOT / "grpo_exp" / "assets" / "tiny"


def options(group: str) -> list[str]:
    return sorted(path.stem for path in (ROOT / "conf" / group).glob("*.yaml"))


@cache
def one_group(choice: str) -> Config:
    return to_typed(compose([choice, "algo.group_size=4"]).config)


def composed(algo: str, correction: str = "none") -> Config:
    """Each option is composed once: a hundred pairs would take as many compositions."""
    return replace(one_group(f"algo={algo}"), correction=one_group(f"correction={correction}").correction)


def test_every_variant_goes_with_every_correction_but_for_those_that_contradict_it() -> None:
    refused = {
        (algo, correction)
        for algo in options("algo")
        for correction in options("correction")
        if find_problems(composed(algo, correction))
    }
    assert refused == {("dppo_tv", "beta_removal")}


def test_a_refusal_names_key_value_and_what_is_allowed() -> None:
    [problem] = find_problems(composed("dppo_tv", "beta_removal"))
    assert problem.key == "correction.proximal"
    assert problem.allowed == "rollout, recompute, interpolate"
    config = to_typed(compose(["algo=gspo", "algo.dual_clip=3"]).config)
    assert [(found.key, found.allowed) for found in find_problems(config)] == [
        ("algo.dual_clip", "null with algo.loss=gspo")
    ]


def test_what_was_recorded_cannot_be_sampled_otherwise() -> None:
    config = to_typed(compose(["algo=dapo", "rollout=replay", "rollout.replay_from=runs"]).config)
    assert "algo.dynamic_sampling" in {problem.key for problem in find_problems(config)}


def gradient(config: Config, tokens_per_micro_batch: int) -> tuple[Tensor, float]:
    """The gradient of a step of the tiny model, as one vector, and its loss."""
    scorer = policy(TINY, chunk=16)
    batch = step_batch(tokens_per_micro_batch, config.algo)
    passes = PassRunner(scorer, config.algo, config.correction, 1.0).run(batch, 1.0)
    return torch.cat([p.grad.flatten() for p in scorer.model.parameters() if p.grad is not None]), passes.loss


@pytest.mark.parametrize("correction", ["none", "seq_tis", "batch_norm"])
@pytest.mark.parametrize("algo", options("algo"))
def test_the_gradient_of_a_variant_does_not_depend_on_the_cut(algo: str, correction: str) -> None:
    """C6: micro-batches of one row, of some and of all, each with its own order and padding."""
    config = composed(algo, correction)
    whole, loss = gradient(config, 4096)
    assert whole.norm() > 1e-3
    for tokens in (1, 60):
        cut, other = gradient(config, tokens)
        assert (cut - whole).abs().max() <= 1e-6 * whole.norm()
        assert other == pytest.approx(loss, rel=1e-5, abs=1e-6)
