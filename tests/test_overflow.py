"""Where the first non-finite number of a step appeared: the pass and the module, in every way in which fp16 overflows."""

import pytest
import torch
from models import Family, checkpoint
from steps import policy, runner, step_batch

from grpo_exp.config.schema import OptimConfig
from grpo_exp.optim import Optimizer
from grpo_exp.overflow import find_overflow
from grpo_exp.policy import Policy

PLAIN = checkpoint(Family.llama, tied=False)


def located(policy: Policy, scale: float = 1.0, num_micro_batches: int = 1) -> dict[str, str]:
    """Run a step that overflows, as the trainer does, and look for the place."""
    passes, batch = runner(policy), step_batch(4096 if num_micro_batches == 1 else 40)
    assert (len(batch.micro_batches) > 1) is (num_micro_batches > 1)
    optimizer = Optimizer(policy.model, OptimConfig(), policy.precision)
    passes.run(batch, scale)
    optimizer.loss_scale.scale = scale
    assert not optimizer.step(1e-3).applied
    found = find_overflow(passes, optimizer.nonfinite_grads(), batch.micro_batches, scale)
    for module in policy.model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    return found


@torch.no_grad()
def scale_weight(policy: Policy, name: str, factor: float) -> None:
    policy.model.get_submodule(name).weight.mul_(factor)


@pytest.mark.parametrize("num_micro_batches", [1, 8])
@pytest.mark.parametrize("name", ["model.layers.0.mlp.down_proj", "model.layers.1.self_attn.v_proj"])
def test_a_forward_pass_names_the_module_whose_output_overflowed_first(name: str, num_micro_batches: int):
    """A10"""
    broken = policy(PLAIN, "fp16")
    scale_weight(broken, name, 2.0e5)
    assert located(broken, num_micro_batches=num_micro_batches) == {"where": "forward", "module": name}


@pytest.mark.parametrize("family", [Family.llama, Family.gemma2])
def test_logits_that_overflow_are_the_heads_whether_or_not_it_is_called_as_a_module(family: Family):
    """A10"""
    broken = policy(checkpoint(family, tied=False), "fp16")
    scale_weight(broken, "lm_head", 2.0e5)
    assert located(broken) == {"where": "forward", "module": "lm_head"}


@pytest.mark.parametrize("tied", [True, False])
def test_a_loss_scale_that_is_too_large_overflows_in_the_head_first(tied: bool):
    """A10: every gradient behind it is non-finite then, and none of them is to blame."""
    broken = policy(checkpoint(Family.qwen3, tied=tied), "fp16")
    assert located(broken, scale=2.0**40) == {"where": "backward", "module": "lm_head"}


def test_a_backward_pass_names_the_module_whose_input_gradient_overflowed_first():
    """A10: a large weight behind small activations, finite on the way forward."""
    broken = policy(PLAIN, "fp16")
    scale_weight(broken, "model.layers.1.mlp.gate_proj", 1e-4)
    scale_weight(broken, "model.layers.1.mlp.down_proj", 2e4)
    assert located(broken, scale=2.0**14) == {"where": "backward", "module": "model.layers.1.mlp.down_proj"}


@pytest.mark.parametrize("name", ["model.layers.0.mlp.up_proj", "model.norm", "lm_head"])
def test_the_gradient_of_a_weight_alone_is_found_too(name: str):
    """A10: a sum over tokens overflows where no gradient of an activation does."""
    broken = policy(PLAIN)
    broken.model.get_submodule(name).weight.register_hook(lambda gradient: gradient * torch.inf)
    assert located(broken) == {"where": "backward", "module": name}


def test_of_an_overflow_that_does_not_come_back_the_gradients_tell():
    """A10: a fault that happened once leaves its trace in the failed step's gradients."""
    broken, calls = policy(PLAIN), []

    def once(gradient: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return gradient * (torch.nan if len(calls) == 1 else 1.0)

    broken.model.get_submodule("model.layers.1.input_layernorm").weight.register_hook(once)
    assert located(broken) == {"where": "backward", "module": "model.layers.1.input_layernorm"}


def test_a_norm_too_large_for_fp32_is_neither():
    broken = policy(PLAIN)
    for parameter in broken.model.parameters():
        parameter.register_hook(lambda gradient: torch.full_like(gradient, 1e30))
    assert located(broken) == {"where": "gradient norm", "module": ""}
