"""The precision hook: shipped options as torch dtypes, what a device cannot do, and the audit that reads dtypes back."""

import dataclasses

import pytest
import torch
from test_sites import BAD_DTYPES
from torch import nn

from grpo_exp import precision as module
from grpo_exp.config.compose import CONF_DIR, compose, load_precision, to_typed
from grpo_exp.config.schema import Config, LossScaleMode, PrecisionConfig
from grpo_exp.config.sites import FOLLOWS
from grpo_exp.errors import ConfigError, RunFailed
from grpo_exp.precision import Audit, DtypeProbe, Precision, mix_warning, observed_dtypes, resolve
from grpo_exp.rollout.start import engine_spec

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
OPTIONS = sorted(path.stem for path in (CONF_DIR / "precision").glob("*.yaml"))
ON_CPU = [option for option in OPTIONS if option != "fp32_tf32"]
TF32 = "fp32_tf32"

TRAINER = {  # option → params, compute, head, optimizer_state
    "fp32": (FP32, FP32, FP32, FP32),
    "bf16": (FP32, BF16, BF16, FP32),
    "fp16": (FP32, FP16, FP16, FP32),
    "bf16_pure": (BF16, BF16, BF16, BF16),
    "fp16_pure": (FP16, FP16, FP16, FP16),
    "bf16_head32": (FP32, BF16, FP32, FP32),
    "fp32_rollout_bf16": (FP32, FP32, FP32, FP32),
    "fp32_rollout_fp16": (FP32, FP32, FP32, FP32),
    "bf16_rollout_fp32": (FP32, BF16, BF16, FP32),
    "auto": (BF16, BF16, BF16, FP32),
}
GENERATOR = {  # option → rollout, rollout_head, wire
    "fp32": (FP32, FP32, FP32),
    "bf16": (BF16, BF16, BF16),
    "fp16": (FP16, FP16, FP16),
    "bf16_pure": (BF16, BF16, BF16),
    "fp16_pure": (FP16, FP16, FP16),
    "bf16_head32": (BF16, FP32, BF16),
    "fp32_rollout_bf16": (BF16, BF16, BF16),
    "fp32_rollout_fp16": (FP16, FP16, FP16),
    "bf16_rollout_fp32": (FP32, FP32, FP32),
    "auto": (BF16, BF16, BF16),
}


def config_of(option: str) -> Config:
    return to_typed(compose([f"precision={option}", "rollout=lockstep"]).config)


def resolved(option: str, device: torch.device = CPU, checkpoint: str = "bf16") -> Precision:
    return resolve(load_precision(option), checkpoint, device, optim_eps=1e-4)


@pytest.fixture
def old_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU without bf16 and TF32."""
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))


@pytest.mark.parametrize("option", ON_CPU)
def test_a_shipped_option_is_what_its_comment_says(option: str):
    """A3"""
    p = resolved(option)
    assert (p.params, p.compute, p.head, p.optimizer_state) == TRAINER[option]
    assert (p.rollout, p.rollout_head, p.wire) == GENERATOR[option]
    assert (p.grad_reduce, p.kv_cache, p.matmul) == (p.params, p.rollout, "highest")
    assert p.loss_scale.mode is (LossScaleMode.dynamic if option == "fp16" else LossScaleMode.none)
    assert p.autocasts is (p.params != p.compute)


def test_the_triple_that_is_compared_differs_in_compute_rollout_and_loss_scale_only():
    configs = [dataclasses.asdict(load_precision(option)) for option in ("fp32", "bf16", "fp16")]
    assert all(config["params"] == "fp32" and config["rollout"] is None for config in configs)
    different = {key for key in configs[0] if len({str(config[key]) for config in configs}) > 1}
    assert different == {"compute", "loss_scale"}


@pytest.mark.parametrize("checkpoint", ["fp32", "bf16", "fp16", "torch.bfloat16"])
def test_auto_is_resolved_once_and_given_to_both_sides(checkpoint: str):
    p = resolved("auto", checkpoint=checkpoint)
    assert len({p.params, p.compute, p.head, p.rollout, p.rollout_head, p.kv_cache, p.wire}) == 1
    assert p.optimizer_state == FP32
    assert "auto" not in p.declared().values()


def test_a_dtype_in_the_model_keywords_reaches_both_sides():
    p = resolve(PrecisionConfig(), "fp32", CPU, {"dtype": "torch.bfloat16"})
    assert (p.params, p.compute, p.rollout, p.wire) == (BF16,) * 4


@pytest.mark.parametrize("value", [value for value in BAD_DTYPES if value is not None], ids=repr)
def test_a_bad_dtype_is_a_value_error(value: object):
    with pytest.raises(ValueError, match=r"precision\.params=.*allowed: auto, bf16"):
        resolve(PrecisionConfig(params=value), "fp32", CPU)  # type: ignore[arg-type]


@pytest.mark.parametrize("site", ["params", "optimizer_state"])
def test_none_is_refused_where_there_is_no_site_to_follow(site: str):
    with pytest.raises(ValueError, match=rf"precision\.{site}=null: allowed: auto, bf16"):
        resolve(PrecisionConfig(**{site: None}), "fp32", CPU)  # type: ignore[arg-type]


@pytest.mark.parametrize("option", ON_CPU)
def test_generators_are_told_their_dtypes_by_plain_explicit_names(option: str):
    """A7: of the rollout site, whatever `auto` would have stood for there."""
    config = config_of(option)
    config.model.init_kwargs = {"dtype": "auto"}
    p = resolved(option)
    spec = engine_spec(config, p, "cpu")
    assert set(spec.dtypes) == {"rollout", "rollout_head", "wire"}
    for site, name in spec.dtypes.items():
        assert type(name) is str
        assert {"fp32": FP32, "bf16": BF16, "fp16": FP16}[name] == getattr(p, site)


def test_a_mix_of_trainer_and_generator_is_one_warning_that_names_both():
    """A8"""
    config = PrecisionConfig(params="fp16", optimizer_state="fp32", rollout="bf16")
    p = resolve(config, "fp32", CPU)
    text = mix_warning(p)
    assert text is not None
    assert "computes in fp16 (precision.compute)" in text
    assert "generator workers in bf16 (precision.rollout)" in text
    assert "head" not in text
    assert "\n" not in text
    fields = [p.declared()[site] for site in ("params", "compute", "optimizer_state", "rollout")]
    assert fields == ["fp16", "fp16", "fp32", "bf16"]


@pytest.mark.parametrize("option", ON_CPU)
def test_shipped_options_warn_exactly_where_they_mix(option: str):
    """A8: equal dtypes, no warning."""
    assert (mix_warning(resolved(option)) is not None) is ("rollout" in option)


def test_a_head_on_one_side_only_is_a_mix_of_its_own():
    text = mix_warning(resolve(PrecisionConfig(params="bf16", head="fp32"), "fp32", CPU))
    assert text is not None
    assert "applies its head in fp32 (precision.head), generator workers in bf16 (precision.rollout_head)" in text
    assert "computes" not in text


@pytest.mark.usefixtures("old_gpu")
def test_bf16_on_a_device_without_it_names_the_option_and_the_usable_ones():
    """A9"""
    with pytest.raises(ConfigError) as caught:
        resolved("bf16", CUDA)
    assert str(caught.value) == "precision.compute='bf16': allowed: fp16, fp32 (this cuda has no bf16)"
    with pytest.raises(ConfigError, match=r"precision\.params='bf16'"):
        resolved("auto", CUDA, "bf16")
    with pytest.raises(ConfigError, match=r"precision\.rollout='bf16'"):
        resolved("fp32_rollout_bf16", CUDA)


@pytest.mark.usefixtures("old_gpu")
def test_other_dtypes_and_other_devices_do_not_mind():
    """A9: fp16 and fp32 are unaffected, a CPU may compute in bf16, and nothing falls back in silence."""
    assert resolved("fp16", CUDA).compute == FP16
    assert resolved("fp32", CUDA).compute == FP32
    assert resolved("bf16", CPU).compute == BF16


def test_tf32_needs_a_device_that_has_it(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ConfigError, match=r"precision\.matmul='high': allowed: highest \(this cpu has no TF32"):
        resolved(TF32, CPU)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    assert resolved(TF32, CUDA).matmul == "high"


def test_the_declared_precision_has_every_site_and_why():
    p = resolved("fp16")
    assert set(p.declared()) == {*FOLLOWS, "matmul", "loss_scale", "num_ranks"} - {"adapter"}
    assert set(p.reasons) == set(FOLLOWS) - {"adapter"}
    assert p.declared()["loss_scale"] == "dynamic"
    assert set(p.kernels(CPU)) == {"fp16"}


def test_the_compute_context_lowers_fp32_weights_to_the_compute_dtype():
    layer, x = nn.Linear(4, 4), torch.ones(2, 4)
    for option in ("fp32", "bf16", "fp16"):
        with resolved(option).compute_context(CPU):
            assert layer(x).dtype == resolved(option).compute
        assert not torch.is_autocast_enabled("cpu")


def test_an_audit_finds_a_difference_and_keeps_what_was_seen():
    audit = Audit(resolved("bf16"))
    audit.check("startup", {"params": "fp32", "rollout": "bf16"})
    with pytest.raises(RunFailed, match=r"first_step.*compute: declared bf16, in effect fp32; head: declared bf16"):
        audit.check("first_step", {"params": "fp32", "compute": "fp32", "head": "fp16"})
    assert audit.observed["startup"] == {"params": "fp32", "rollout": "bf16"}
    assert audit.observed["first_step"]["compute"] == "fp32"


def test_an_audit_is_complete_when_every_site_was_seen():
    audit = Audit(resolved("bf16"))
    first, *rest = audit.declared
    audit.check("startup", {site: audit.declared[site] for site in rest})
    with pytest.raises(RunFailed, match=f"nothing was seen of {first}"):
        audit.check_complete()
    audit.check("first_step", {first: audit.declared[first]})
    audit.check_complete()


def test_observed_dtypes_are_of_floating_point_tensors():
    tensors = [torch.zeros(1), torch.zeros(1, dtype=torch.int64), None, torch.zeros(1, dtype=BF16)]
    assert observed_dtypes(tensors) == "bf16+fp32"
    assert observed_dtypes(tensors[:3]) == "fp32"
    assert observed_dtypes([None]) == "none"
    assert observed_dtypes([torch.zeros(1, dtype=torch.float64)]) == "float64"


def test_a_probe_sees_what_linear_layers_really_give_until_it_is_closed():
    layers = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    probe = DtypeProbe(layers)
    assert probe.observed() == "none"
    with torch.autocast("cpu", dtype=BF16):
        layers(torch.zeros(1, 4))
    assert probe.observed() == "bf16"
    probe.close()
    layers(torch.zeros(1, 4))
    assert probe.observed() == "bf16"


def test_the_table_of_dtypes_is_the_only_one():
    assert module.DTYPES == {"fp32": FP32, "bf16": BF16, "fp16": FP16}
    assert {module.NAMES[dtype] for dtype in module.DTYPES.values()} == set(module.DTYPES)
