"""Hydra's Optuna sweeper over the same configuration (``pip install hydra-optuna-sweeper``)."""

import json
from pathlib import Path

import pytest
import yaml
from commands import SMALL, command
from run_folders import metric_rows, write_run
from small_runs import metrics, status

from grpo_exp.report.verdict import value_of


@pytest.mark.slow
def test_a_search_goes_by_the_declared_metric_and_names_its_runs_by_what_it_varies(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    search = ("hydra/sweeper=optuna", "hydra.sweeper.n_trials=2", "hydra.sweeper.n_jobs=1", "hydra.sweeper.sampler.seed=0",
              "hydra.sweeper.direction=maximize", "optim.lr=tag(log,interval(1e-4,1e-2))")  # fmt: skip
    ended = command("-m", *SMALL, *search, "sweep.metric=reward/mean", "sweep.window=2", cwd=tmp_path)
    assert ended.code == 0, ended.err
    folders = [path for path in (tmp_path / "runs").glob("*_*") if path.is_dir()]
    assert [status(path)["state"] for path in folders] == ["done", "done"]
    factors = [json.loads((path / "manifest.json").read_text())["sweep"]["factors"] for path in folders]
    assert all(list(found) == ["optim.lr"] for found in factors)
    found = yaml.safe_load((tmp_path / "runs" / ".sweep" / "optimization_results.yaml").read_text())
    ends = [sum(row["reward/mean"] for row in metrics(path)[-2:]) / 2 for path in folders]
    assert found["best_value"] == pytest.approx(max(ends))


def test_what_a_run_is_compared_by_follows_its_own_rules(tmp_path: Path) -> None:
    rows = metric_rows("bf16", 0, 20)
    done = write_run(tmp_path, "done", rows=rows, config={"sweep.metric": "reward/mean", "sweep.window": 2})
    assert value_of(done) == pytest.approx((rows[-1]["reward/mean"] + rows[-2]["reward/mean"]) / 2)
    failed = write_run(tmp_path, "failed", state="failed", rows=rows, config={"sweep.failures": "start"})
    assert value_of(failed) == 0.2
    assert value_of(write_run(tmp_path, "left", state="failed", rows=rows)) is None
    assert value_of(write_run(tmp_path, "no_rows", rows=[])) is None
