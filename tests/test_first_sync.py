"""The check after the first sync: same tokens, same log-probabilities, or the run does not begin."""

from pathlib import Path
from typing import Any

import pytest
from small_runs import metrics, small_trainer, status

from grpo_exp import jsonl
from grpo_exp.errors import RunFailed
from grpo_exp.folder import State
from grpo_exp.rollout.hf import HFEngine


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_in_fp32_the_first_step_has_no_mismatch_at_any_temperature(tmp_path: Path, temperature: float) -> None:
    """B2: with the engine of rollout=hf; test_vllm_run.py has the same for vLLM."""
    overrides = (
        "trainer.max_steps=1",
        "rollout.max_staleness=0",
        f"rollout.temperature={temperature}",
        "task.num_eval=0",
    )
    small_trainer(tmp_path, "rollout=lockstep", "probe.every=0", *overrides).train()
    (row,) = [row for row in metrics(tmp_path) if row["step"] == 1]
    assert abs(row["mismatch/mean"]) < 1e-4
    assert row["mismatch/abs_max"] < 1e-4
    assert row["ratio/mean"] == pytest.approx(1.0, abs=1e-3)
    assert row["ratio/clip_frac"] == 0


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_run_writes_down_how_far_both_sides_were_apart(tmp_path: Path, precision: str) -> None:
    overrides = "rollout=lockstep", "trainer.max_steps=1", "probe.every=0", f"precision={precision}"
    assert small_trainer(tmp_path, *overrides).train() is State.done
    found = jsonl.read_json(tmp_path / "manifest.json")["generator"]["first_sync"]
    assert found["tokens"] > 0
    assert found["abs_mean"] < found["bound"] == {"fp32": 1e-3, "bf16": 0.5, "fp16": 0.1}[precision]


@pytest.mark.parametrize("fault", ["an untempered log-probability", "another head"])
def test_a_generator_that_computes_something_else_ends_the_run_before_it_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """B2, B9: what a checksum of the weights cannot see."""
    load = HFEngine.load

    def load_and_spoil(self: Any, payload: Any, fd: int) -> int:
        held = load(self, payload, fd)
        if fault == "another head":
            self._head_weight = self._head_weight + 0.02 * self._head_weight.roll(1, 0)
        else:
            self._head_weight = self._head_weight * 0.7
        return held

    monkeypatch.setattr(HFEngine, "load", load_and_spoil)
    with pytest.raises(RunFailed, match=r"log-probabilities are not the trainer's, .* more than rounding explains"):
        small_trainer(tmp_path, "rollout=lockstep", "trainer.max_steps=1", "probe.every=0").train()
    assert status(tmp_path)["updates"] == 0


def test_every_worker_is_asked(tmp_path: Path) -> None:
    asked: list[list[int]] = []

    class Ask:
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            pool, submit = trainer.source.pool, trainer.source.pool.submit

            def remember(requests: Any) -> None:
                submit(requests)
                asked.append([sum(serial < 0 for serial in member.requests) for member in pool.members])

            pool.submit = remember  # type: ignore[method-assign]
            assert len(trainer.source.first_completions(4)) == 2

    overrides = "rollout.num_workers=2", "trainer.max_steps=1", "probe.every=0", "task.num_eval=0"
    trainer = small_trainer(tmp_path, *overrides, callbacks=[Ask()])
    assert trainer.train() is State.done
    assert asked == [[1, 1]]
