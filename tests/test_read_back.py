"""An injected difference, wherever it is, stops the run, and the manifest shows it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import status
from test_trainer_precision import BF16, FP16, Steps, manifest, trainer

from grpo_exp import AsyncGRPOTrainer
from grpo_exp.config.schema import Backend
from grpo_exp.errors import RunFailed
from grpo_exp.rollout import start
from grpo_exp.rollout.hf import HFEngine
from grpo_exp.rollout.types import EngineSpec


class ServesFp16(HFEngine):
    """Builds its model in another dtype than it was told."""

    def __init__(self, spec: EngineSpec) -> None:
        super().__init__(spec)
        self.model.to(FP16)


class CastsItsHead(HFEngine):
    """Applies its head in another dtype than it was told, which shows once something was generated."""

    def __init__(self, spec: EngineSpec) -> None:
        super().__init__(spec)
        self.head_dtype = BF16


def ends_with_a_difference(run: AsyncGRPOTrainer, path: Path, phase: str, site: str, found: str) -> None:
    """The run fails, and its manifest shows what was found."""
    with pytest.raises(RunFailed, match=rf"precision is not what was asked for \({phase}\).*{site}: declared"):
        run.train()
    told = status(path)
    assert (told["state"], told["exit_code"]) == ("failed", 1)
    assert f"{site}: declared" in told["reason"]
    seen = manifest(path)
    assert seen["observed"][phase][site] == found != seen["declared"][site]


def test_a_callback_that_casts_the_model_stops_the_run(tmp_path: Path):
    """The read-back: an injected difference in the trainer."""
    run = trainer(tmp_path, "precision=fp32", callbacks=[Steps(lambda step: run.model.to(BF16) and None)])
    ends_with_a_difference(run, tmp_path, "first_sync", "params", "bf16")
    assert manifest(tmp_path)["observed"]["startup"]["params"] == "fp32"


@pytest.mark.parametrize(
    ("engine", "phase", "site", "found"),
    [(ServesFp16, "startup", "rollout", "fp16"), (CastsItsHead, "first_sync", "rollout_head", "bf16")],
)
def test_a_generator_in_another_dtype_stops_the_run(
    engine: type[HFEngine], phase: str, site: str, found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The read-back: an injected difference in the engine."""
    monkeypatch.setitem(start.ENGINES, Backend.hf, f"{__name__}:{engine.__name__}")
    run = trainer(tmp_path, "precision=fp32")
    ends_with_a_difference(run, tmp_path, phase, site, found)


def test_an_autocast_that_someone_adds_is_seen(tmp_path: Path):
    """A forward pass under a literal autocast: fp32 in name, bf16 in its products."""
    run = trainer(tmp_path, "precision=fp32")
    forward = run.policy.body.forward

    def lowered(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", dtype=BF16):
            return forward(*args, **kwargs)

    run.policy.body.forward = lowered
    ends_with_a_difference(run, tmp_path, "first_sync", "compute", "bf16")


def test_moments_in_another_dtype_are_seen(tmp_path: Path):
    """Optimizer state that takes the dtype the weights were loaded in, whatever was asked."""
    run = trainer(tmp_path, "precision=bf16_pure", "precision.optimizer_state=fp32", "optim.lr=1e-2")
    run.optimizer.widened, run.optimizer.stepped = False, list(run.optimizer.params)
    run.optimizer.adamw = torch.optim.AdamW(run.optimizer.params, lr=1e-2)
    ends_with_a_difference(run, tmp_path, "first_step", "optimizer_state", "bf16")
