"""The decomposition with vLLM's engine on the other side: what is left to the engine is the engine."""

from pathlib import Path

import pytest
from small_runs import metrics, small_trainer

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_gap_to_vllm_is_taken_apart(tmp_path: Path, precision: str) -> None:
    overrides = ["rollout=vllm", f"precision={precision}", "probe.every=1", "trainer.max_steps=2"]
    small_trainer(tmp_path, *overrides, "trainer.eval_every=0").train()
    rows = [row for row in metrics(tmp_path) if "probe/share" in row]
    assert len(rows) == 2
    for row in rows:
        part = {name.removesuffix("_mean").removeprefix("probe/"): row[name] for name in row if name.endswith("_mean")}
        assert part["alpha"] + part["beta"] == pytest.approx(part["total"], abs=1e-9)
        assert part["beta_dtype"] + part["beta_batch"] + part["beta_engine"] == pytest.approx(part["beta"], abs=1e-9)
        engine, dtype = row["probe/beta_engine_abs_mean"], row["probe/beta_dtype_abs_mean"]
        if precision == "fp32":
            assert dtype == 0.0
            assert 0 < engine < 1e-4
        else:
            assert engine > 1e-4
            assert dtype > 1e-4
