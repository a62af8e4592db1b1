"""Two ranks on this machine train what one trains."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from commands import PATIENCE_S, Ended
from safetensors.torch import load_file
from small_runs import metrics, repeatable, status

from grpo_exp import jsonl

SMALL = (
    "debug=smoke", "rollout=lockstep", "precision=fp32", "trainer.max_steps=3", "trainer.eval_every=0",
    "trainer.save_every=0", "probe.every=0", "task.num_eval=0", "trainer.tokens_per_micro_batch=48",
)  # fmt: skip


def launched(num_ranks: int, *arguments: str, cwd: Path) -> Ended:
    """A command line started by torchrun; 0 ranks: without it."""
    torchrun = [str(Path(sys.executable).with_name("torchrun")), "--nproc-per-node", str(num_ranks), "--standalone"]
    program = torchrun if num_ranks else [sys.executable]
    done = subprocess.run(
        [*program, "-m", "grpo_exp", *arguments],
        cwd=cwd, capture_output=True, text=True, timeout=2 * PATIENCE_S, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    return Ended(done.returncode, done.stdout, done.stderr, 0.0)


def the_run(folder: Path) -> Path:
    [path] = [path for path in (folder / "runs").iterdir() if (path / "status.json").is_file()]
    return path


@pytest.mark.slow
def test_two_ranks_under_ddp_train_what_one_process_trains(tmp_path: Path) -> None:
    for name, num_ranks, strategy in (("one", 0, "single"), ("two", 2, "ddp")):
        (tmp_path / name).mkdir()
        ended = launched(num_ranks, *SMALL, f"distributed={strategy}", cwd=tmp_path / name)
        assert ended.code == 0, ended.err
    one, two = the_run(tmp_path / "one"), the_run(tmp_path / "two")
    assert status(two)["state"] == "done"
    rows, others = (
        [{key: value for key, value in row.items() if value is not None} for row in repeatable(metrics(path))]
        for path in (one, two)
    )
    assert len(rows) == 3
    for row, other in zip(rows, others, strict=True):
        for key in row:  # a mismatch is rounding itself here, and its slope is per 1 000 tokens
            bound = 1e-3 if key == "mismatch/drift_slope" else 1e-5 if key.startswith("mismatch/") else 1e-6
            assert other[key] == pytest.approx(row[key], rel=1e-5, abs=bound), key
    weights, found = (load_file(path / "checkpoints/step-000003/model.safetensors") for path in (one, two))
    assert max(float((weights[name] - found[name]).abs().max()) for name in weights) < 1e-5
    observed = jsonl.read_json(two / "manifest.json")["precision"]["observed"]["first_step"]
    assert (observed["num_ranks"], observed["wrapper"], observed["backend"]) == ("2", "ddp", "gloo")


def test_more_ranks_than_the_strategy_takes_are_refused_and_so_is_a_strategy_without_a_launcher(tmp_path: Path) -> None:
    ended = launched(0, *SMALL, "distributed=ddp", cwd=tmp_path)
    assert ended.code == 2
    assert "distributed.strategy" in ended.err
    assert "torchrun --nproc-per-node" in ended.err
    ended = launched(2, *SMALL, cwd=tmp_path)
    assert "distributed.strategy" in ended.err
    assert "one of 2 ranks" in ended.err
    assert not (tmp_path / "runs").exists()
