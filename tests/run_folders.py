"""Writes run folders as a run would, without running anything: for tests of what reads them.

The config comes from the schema, so it has every key a real one has. Curves are smooth functions of step and seed, so
that the expected numbers can be worked out by hand.
"""

import json
import socket
from collections.abc import Mapping, Sequence
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from grpo_exp.config import schema

Row = dict[str, Any]
IMPOSSIBLE_PID = 2**22 + 1  # above the highest pid of Linux
DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)

SITES = ("params", "compute", "head", "grad_reduce", "optimizer_state", "rollout", "rollout_head", "kv_cache", "wire")
LOW = {"fp32": "fp32", "bf16": "bf16", "fp16": "fp16"}  # what an arm computes and samples in
MISMATCH = {"fp32": 2e-7, "bf16": 4e-3, "fp16": 5e-4}


def write_run(
    root: Path,
    name: str | None = None,
    *,
    precision: str = "bf16",
    seed: int = 0,
    state: str = "done",
    reason: str | None = None,
    rows: Sequence[Row] | None = None,
    num_steps: int = 20,
    gain: float = 0.0,
    factors: Mapping[str, str] | None = None,
    baseline: str | None = None,
    config: Mapping[str, Any] | None = None,
    manifest: Mapping[str, Any] | None = None,
    status: Mapping[str, Any] | None = None,
) -> Path:
    """Write one folder and return its path.

    Args:
        rows: the metrics; by default ``metric_rows`` of the other arguments.
        gain: added to the accuracy at the end.
        factors: what the manifest declares; by default precision and seed. ``{}`` declares nothing.
        config, manifest: dotted key → value, set on top; the value None in ``manifest`` stays a null.
        status: keys set on top.
    """
    name = name or f"precision={precision}-seed={seed}"
    folder = root / name
    folder.mkdir(parents=True)
    frozen = frozen_config(precision, seed, baseline)
    for key, value in (config or {}).items():
        put(frozen, key, value)
    (folder / "config.yaml").write_text(yaml.dump(frozen, Dumper=DUMPER, sort_keys=False), encoding="utf-8")
    declared = {"precision": precision, "seed": str(seed)} if factors is None else dict(factors)
    content = manifest_of(name, precision, seed, declared, baseline)
    for key, value in (manifest or {}).items():
        put(content, key, value)
    (folder / "manifest.json").write_text(json.dumps(content), encoding="utf-8")
    if rows is None:
        rows = metric_rows(precision, seed, num_steps, gain)
    text = "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows)
    (folder / "metrics.jsonl").write_text(text, encoding="utf-8")
    last = {"state": state, "step": num_steps, "max_steps": num_steps, "updates": num_steps, "reason": reason}
    last |= {"traceback": None, "exit_code": 0 if state == "done" else None, "pid": None, "host": socket.gethostname()}
    last |= {"started": "2026-01-01T00:00:00+00:00", "heartbeat": "2026-01-01T00:01:00+00:00", "ended": None}
    last |= {
        "groups": {"started": 0, "trained": 0, "dropped_stale": 0, "dropped_failed": 0, "replaced": 0, "left_over": 0}
    }
    (folder / "status.json").write_text(json.dumps(last | dict(status or {})), encoding="utf-8")
    for inner in ("rollouts", "checkpoints", "logs"):
        (folder / inner).mkdir()
    return folder


def write_sweep(
    root: Path, precisions: Sequence[str] = ("bf16", "fp16", "fp32"), seeds: Sequence[int] = (0, 1)
) -> None:
    """Precision × seed, every run done, with fp32 as the baseline."""
    for index, precision in enumerate(precisions):
        for seed in seeds:
            gain = 0.01 * index + 0.004 * index * seed
            write_run(root, precision=precision, seed=seed, gain=gain, baseline="precision=fp32")


def write_troubled_sweep(root: Path) -> None:
    """Some of everything that can go wrong in a sweep."""
    write_sweep(root, ["bf16", "fp16", "fp32"], (0, 1, 2))
    more: dict[str, Any] = {"baseline": "precision=fp32", "num_steps": 12}
    write_run(root, precision="bf16", seed=3, state="running", status={"pid": IMPOSSIBLE_PID, "max_steps": 20}, **more)
    write_run(root, precision="fp16", seed=3, state="failed", reason="no finite gradient\nin 20 steps in a row", **more)
    write_run(root, precision="fp32", seed=3, state="preempted", reason="SIGTERM", rows=[], **more)
    write_run(root, precision="fp32", seed=4, state="created", status={"step": 0}, rows=[], **more)
    (write_run(root, "torn", precision="fp32", seed=5) / "manifest.json").write_text("{")
    rows = metric_rows("fp16", 6)
    rows[-1]["eval/accuracy"] = None
    write_run(root, precision="fp16", seed=6, rows=rows, config={"trainer.eval_every": 25})
    write_run(root, precision="bf16", seed=6, rows=metric_rows("bf16", 6, 18), manifest={"versions.torch": "2.12.1"})


def frozen_config(precision: str, seed: int, baseline: str | None = None) -> dict[str, Any]:
    config = deepcopy(_config_of_arm(precision))
    config["seed"] = seed
    config["sweep"]["baseline"] = baseline
    return config


@cache
def _config_of_arm(precision: str) -> dict[str, Any]:
    low = LOW.get(precision, "fp32")
    block = schema.PrecisionConfig(params="fp32", compute=low, rollout=low)
    if low == "fp16":
        block.loss_scale = schema.LossScaleConfig(mode=schema.LossScaleMode.dynamic)
    config = schema.Config(
        model=schema.ModelConfig(name_or_path="tiny"),
        precision=block,
        rollout=schema.RolloutConfig(),
        task=schema.TaskConfig(),
        algo=schema.AlgoConfig(),
        correction=schema.CorrectionConfig(),
        optim=schema.OptimConfig(lr=3e-3),
        distributed=schema.DistributedConfig(),
        tracker=schema.TrackerConfig(),
        sweep=schema.SweepConfig(name="precision"),
    )
    plain = OmegaConf.to_container(OmegaConf.structured(config), resolve=True, enum_to_str=True)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def manifest_of(
    name: str, precision: str, seed: int, factors: Mapping[str, str], baseline: str | None = None
) -> dict[str, Any]:
    low = LOW.get(precision, "fp32")
    sites = {site: "fp32" if site in ("params", "grad_reduce", "optimizer_state") else low for site in SITES}
    choices = {"model": "tiny", "precision": precision, "rollout": "hf", "task": "reverse", "correction": "none"}
    choices |= {"tracker": "none", "hydra/launcher": "local"}
    return {
        "run": {"name": name, "created": f"2026-01-01T00:00:0{seed % 10}+00:00", "config_hash": f"{precision}{seed}"},
        "sweep": {"name": "precision" if factors else None, "factors": dict(factors), "baseline": baseline},
        "choices": choices,
        "overrides": [f"precision={precision}", f"seed={seed}"],
        "versions": {"python": "3.11.9", "grpo_exp": "0.1.0", "torch": "2.13.0", "transformers": "5.19.0"},
        "git": {"commit": "0123abc", "dirty": False},
        "hardware": {
            "host": f"node{seed}",
            "cpu": "a cpu",
            "cores": 2,
            "memory_bytes": 16 * 2**30 + 4096 * seed,
            "device": "cpu",
            "gpus": [],
        },
        "precision": {
            "declared": {**sites, "matmul": "highest", "loss_scale": "dynamic" if low == "fp16" else "none"},
            "reasons": dict.fromkeys(SITES, f"precision={precision}"),
            "observed": {"startup": dict(sites), "first_step": dict(sites)},
            "kernels": {low: "a kernel"},
        },
    }


def metric_rows(precision: str = "bf16", seed: int = 0, num_steps: int = 20, gain: float = 0.0) -> list[Row]:
    """Row 0 is the evaluation before training; accuracy goes from 0.2 to ``0.85 + 0.01 seed + gain``."""
    rows: list[Row] = [{"step": 0, "eval/accuracy": 0.2, "eval/accuracy_greedy": 0.21, "eval/reward": 0.2}]
    rows[0] |= {"time": 1.7e9, "wall_s": 0.0, "samples": 0, "tokens": 0}
    end = 0.85 + 0.01 * seed + gain
    for step in range(1, num_steps + 1):
        share = step / num_steps
        row: Row = {"step": step, "time": 1.7e9 + step / 2, "wall_s": step / 2, "samples": 256 * step}
        row |= {"tokens": 1000 * step, "reward/mean": round(0.2 + (end - 0.2) * share, 6), "reward/std": 0.3}
        row |= {"loss/policy": 0.01, "grad/norm": 0.5, "ratio/clip_frac": 0.01, "ratio/mean": 1.0}
        row |= {"mismatch/abs_mean": MISMATCH.get(precision, 1e-6), "memory/peak_bytes": 2**28 + step}
        row |= {"staleness/mean": 1.0, "staleness/max": 1, "perf/step_s": 0.5, "lr": 3e-3}
        if precision == "fp16":
            row |= {"fp16/scale": 65536.0, "fp16/skipped_total": 1 + seed}
        if step % 10 == 0 or step == num_steps:
            row |= {"eval/accuracy": round(0.2 + (end - 0.2) * share, 6), "eval/reward": round(end * share, 6)}
            row |= {"eval/accuracy_greedy": round(0.21 + (end + 0.05 - 0.21) * share, 6)}
        rows.append(row)
    return rows


def put(mapping: dict[str, Any], key: str, value: object) -> None:
    """Set a dotted key."""
    *parents, last = key.split(".")
    for parent in parents:
        mapping = mapping.setdefault(parent, {})
    mapping[last] = value
