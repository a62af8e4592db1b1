"""Loss scale, learning rate and AdamW: against torch's own GradScaler and optimizer."""

import math
from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from grpo_exp.config.compose import load_precision
from grpo_exp.config.schema import LossScaleConfig, LossScaleMode, OptimConfig, PrecisionConfig, Schedule
from grpo_exp.optim import LossScale, Optimizer, learning_rate
from grpo_exp.precision import Precision, resolve

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
DYNAMIC = LossScaleConfig(LossScaleMode.dynamic, init=2.0**10, growth_interval=3)


def precision(config: PrecisionConfig | str) -> Precision:
    config = load_precision(config) if isinstance(config, str) else config
    return resolve(config, "fp32", torch.device("cpu"), optim_eps=1e-4)


def network(dtype: torch.dtype = FP32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).to(dtype)


def gradients(model: nn.Module, num_steps: int, dtype: torch.dtype = FP32) -> Iterator[list[Tensor]]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(num_steps):
        yield [torch.randn(p.shape, generator=generator).to(dtype) for p in model.parameters()]


def set_gradients(model: nn.Module, values: list[Tensor], scale: float = 1.0) -> None:
    for parameter, value in zip(model.parameters(), values, strict=True):
        parameter.grad = value * scale


@settings(max_examples=80, deadline=None)
@given(
    finite=st.lists(st.booleans(), min_size=1, max_size=40),
    init=st.sampled_from([65536.0, 1.0, 1e-30, 2.0**126, 3e38, 12345.678]),
    growth=st.sampled_from([2.0, 1.5, 1.1, 1e10]),
    backoff=st.sampled_from([0.5, 0.3, 1e-3]),
    interval=st.integers(1, 5),
)
def test_the_loss_scale_is_that_of_torchs_gradscaler_to_the_bit(
    finite: list[bool], init: float, growth: float, backoff: float, interval: int
):
    """A3: for every sequence of overflows, also where the scale meets the ends of fp32."""
    ours = LossScale(LossScaleConfig(LossScaleMode.dynamic, init, growth, backoff, interval))
    theirs = torch.amp.GradScaler("cpu", init, growth, backoff, interval)
    parameter = nn.Parameter(torch.zeros(1))
    sgd = torch.optim.SGD([parameter], lr=0.0)
    for ok in finite:
        theirs.scale(torch.zeros(1))
        assert ours.scale == theirs.get_scale()
        parameter.grad = torch.full((1,), 0.0 if ok else math.inf)
        theirs.step(sgd)
        theirs.update()
        ours.update(ok)
        assert ours.growth_tracker == theirs._get_growth_tracker()
    assert ours.scale == theirs.get_scale()


@pytest.mark.parametrize("mode", [LossScaleMode.none, LossScaleMode.static])
def test_only_a_dynamic_scale_moves(mode: LossScaleMode):
    scale = LossScale(LossScaleConfig(mode, init=8.0, growth_interval=1))
    for finite in (True, False, True):
        scale.update(finite)
    assert scale.scale == (8.0 if mode is LossScaleMode.static else 1.0)
    assert scale.mode_in_effect == mode.name


@pytest.mark.parametrize("option", ["fp32", "bf16", "fp16", "bf16_pure", "fp16_pure", "bf16_rollout_fp32", "auto"])
def test_a_loss_scale_is_enabled_for_fp16_over_fp32_masters_only(option: str):
    """A3"""
    optimizer = Optimizer(network(), OptimConfig(), precision(option))
    assert optimizer.loss_scale.enabled is (option == "fp16")
    assert optimizer.loss_scale.scale == (65536.0 if option == "fp16" else 1.0)


def test_the_scale_and_its_tracker_survive_a_checkpoint():
    """A12"""
    before = LossScale(DYNAMIC)
    for finite in (True, True, True, False, True):
        before.update(finite)
    after = LossScale(DYNAMIC)
    after.load_state_dict(before.state_dict())
    for finite in (True, True, True):
        before.update(finite)
        after.update(finite)
        assert (after.scale, after.growth_tracker) == (before.scale, before.growth_tracker)


@pytest.mark.parametrize("max_grad_norm", [0.0, 1.0, 100.0])
def test_a_step_is_that_of_gradscaler_clipping_and_adamw(max_grad_norm: float):
    """A3: also across a skipped step."""
    config = OptimConfig(lr=1e-2, weight_decay=0.1, max_grad_norm=max_grad_norm)
    ours, theirs = network(), network()
    optimizer = Optimizer(ours, config, precision(PrecisionConfig("fp32", "fp16", loss_scale=DYNAMIC)))
    adamw = torch.optim.AdamW(theirs.parameters(), 1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    scaler = torch.amp.GradScaler("cpu", DYNAMIC.init, growth_interval=DYNAMIC.growth_interval)
    for index, values in enumerate(gradients(ours, 8)):
        if index == 4:
            values[0][0, 0] = math.inf
        set_gradients(ours, values, optimizer.loss_scale.scale)
        outcome = optimizer.step(config.lr)
        set_gradients(theirs, values)
        for parameter in theirs.parameters():
            assert parameter.grad is not None
            parameter.grad = scaler.scale(parameter.grad)
        scaler.unscale_(adamw)
        norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), max_grad_norm or math.inf)
        scaler.step(adamw)
        scaler.update()
        assert outcome.applied is (index != 4)
        assert outcome.grad_norm == pytest.approx(float(norm), rel=1e-6)
        assert optimizer.loss_scale.scale == scaler.get_scale()
        for found, expected in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_non_finite_gradient_leaves_weights_and_moments_as_they_were(bad: float):
    """A10"""
    model = network()
    optimizer = Optimizer(model, OptimConfig(lr=1e-2), precision("fp32"))
    first, second = gradients(model, 2)
    set_gradients(model, first)
    assert optimizer.step(1e-2).applied
    weights = [p.detach().clone() for p in model.parameters()]
    moments = {name: tensor.clone() for name, tensor in optimizer.tensors().items()}
    second[2][0, 3] = bad
    set_gradients(model, second)
    outcome = optimizer.step(1e-2)
    assert (outcome.applied, outcome.changed_frac) == (False, 0.0)
    assert not math.isfinite(outcome.grad_norm)
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), weights, strict=True))
    assert all(torch.equal(tensor, moments[name]) for name, tensor in optimizer.tensors().items())
    assert optimizer.nonfinite_grads()[-1] == "2.weight"


@pytest.mark.parametrize("params", ["bf16", "fp16"])
def test_moments_may_be_wider_than_the_weights(params: str):
    """AdamW in fp32, rounded to the weights after each step, and no master weights: small updates are still lost."""
    dtype = {"bf16": BF16, "fp16": FP16}[params]
    model, exact = network(dtype), network(dtype).float()
    optimizer = Optimizer(model, OptimConfig(lr=0.1, max_grad_norm=0.0), precision(PrecisionConfig(params)))
    adamw = torch.optim.AdamW(exact.parameters(), 0.1, betas=(0.9, 0.95), weight_decay=0.0)
    for values in gradients(model, 3, dtype):
        set_gradients(model, values)
        set_gradients(exact, [value.float() for value in values])
        assert optimizer.step(0.1).applied
        adamw.step()
        with torch.no_grad():
            for parameter in exact.parameters():
                parameter.copy_(parameter.to(dtype))
        for found, expected in zip(model.parameters(), exact.parameters(), strict=True):
            assert found.dtype == dtype
            assert torch.equal(found.float(), expected)
    assert {moment.dtype for moment in optimizer.moments()} == {FP32}


@pytest.mark.parametrize("option", ["bf16_pure", "fp16_pure"])
def test_without_any_fp32_the_moments_have_the_dtype_of_the_weights(option: str):
    chosen = precision(option)
    model = network(chosen.params)
    optimizer = Optimizer(model, OptimConfig(lr=0.1, eps=1e-4), chosen)
    for values in gradients(model, 3, chosen.params):
        set_gradients(model, values)
        assert optimizer.step(0.1).applied
    assert {moment.dtype for moment in optimizer.moments()} == {chosen.params}
    assert all(bool(p.isfinite().all()) for p in model.parameters())


def test_the_norm_of_16_bit_gradients_does_not_overflow():
    model = network(FP16)
    optimizer = Optimizer(model, OptimConfig(eps=1e-4), precision("fp16_pure"))
    set_gradients(model, [torch.full_like(p, 1000.0) for p in model.parameters()])
    outcome = optimizer.step(1e-3)
    assert outcome.applied
    count = sum(p.numel() for p in model.parameters())
    assert outcome.grad_norm == pytest.approx(1000.0 * math.sqrt(count), rel=1e-3)


@pytest.mark.parametrize(("option", "low", "high"), [("bf16_pure", 0.0, 0.01), ("fp32", 0.99, 1.0)])
def test_the_share_of_weights_that_changed_tells_bf16_from_fp32(option: str, low: float, high: float):
    """A14"""
    chosen = precision(option)
    torch.manual_seed(0)
    model = nn.Linear(64, 64).to(chosen.params)
    optimizer = Optimizer(model, OptimConfig(lr=1e-6), chosen)
    for values in gradients(model, 5, chosen.params):
        set_gradients(model, values)
        outcome = optimizer.step(1e-6)
        assert low <= outcome.changed_frac <= high


@pytest.mark.parametrize("config", [PrecisionConfig("fp32"), PrecisionConfig("bf16"), load_precision("bf16_pure")])
def test_moments_from_a_checkpoint_go_on_bit_for_bit(config: PrecisionConfig):
    """A12"""
    chosen = precision(config)
    straight, resumed = network(chosen.params), network(chosen.params)
    first = Optimizer(straight, OptimConfig(lr=0.1), chosen)
    steps = list(gradients(straight, 4, chosen.params))
    for values in steps[:2]:
        set_gradients(straight, values)
        first.step(0.1)
    resumed.load_state_dict(straight.state_dict())
    second = Optimizer(resumed, OptimConfig(lr=0.1), chosen)
    second.load_tensors({name: tensor.clone() for name, tensor in first.tensors().items()})
    for values in steps[2:]:
        set_gradients(straight, [v.clone() for v in values])
        set_gradients(resumed, [v.clone() for v in values])
        first.step(0.1)
        second.step(0.1)
    for found, expected in zip(resumed.parameters(), straight.parameters(), strict=True):
        assert torch.equal(found, expected)


def test_frozen_parameters_are_left_out():
    model = network()
    model[0].weight.requires_grad_(False)
    optimizer = Optimizer(model, OptimConfig(lr=0.1), precision("fp32"))
    before = model[0].weight.clone()
    model(torch.ones(2, 6)).sum().backward()
    assert optimizer.step(0.1).applied
    assert torch.equal(model[0].weight, before)
    assert "0.weight" not in dict(optimizer.named)


def test_a_constant_rate_after_a_warm_up_that_starts_above_zero():
    config = OptimConfig(lr=1.0, warmup_steps=3)
    assert [learning_rate(config, update, 10) for update in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


@pytest.mark.parametrize("schedule", [Schedule.linear, Schedule.cosine])
def test_a_decay_ends_at_zero_at_the_horizon_and_not_before(schedule: Schedule):
    config = OptimConfig(lr=1.0, warmup_steps=2, schedule=schedule)
    rates = [learning_rate(config, update, 12) for update in range(13)]
    assert rates[2] == 1.0
    assert all(a > b for a, b in pairwise(rates[2:]))
    assert rates[7] == pytest.approx(0.5)
    assert rates[12] == pytest.approx(0.0, abs=1e-12)
    assert learning_rate(config, 10**6, None) == 1.0, "without a horizon there is nothing to decay to"
