"""The numbers of a comparison: which rows and runs they come from, and what is said about the gaps."""

from pathlib import Path

import pytest
from run_folders import metric_rows, write_run, write_sweep, write_troubled_sweep

from grpo_exp.errors import ConfigError
from grpo_exp.report.layout import Grid
from grpo_exp.report.load import find_runs
from grpo_exp.report.measures import DECOMPOSITION
from grpo_exp.report.render import sections
from grpo_exp.report.stats import DifferenceKind
from grpo_exp.report.tables import Summary, summarise


def rounded(value: float | None) -> float | None:
    return value if value is None else round(value, 12)


def summary_of(root: Path, baseline: str | None = None, metric: str | None = None) -> Summary:
    return summarise(find_runs([root]), baseline, metric)


def test_numbers_are_those_of_the_last_rows(tmp_path: Path) -> None:
    write_sweep(tmp_path, ["bf16", "fp32"], (0, 1))
    bf16, fp32 = summary_of(tmp_path).arms
    assert bf16.estimates["eval/accuracy"].mean == pytest.approx(0.855)
    assert bf16.estimates["eval/accuracy at start"].mean == pytest.approx(0.2)
    assert bf16.estimates["reward/mean"].mean == pytest.approx(0.855)
    assert bf16.estimates["eval/accuracy_greedy"].mean == pytest.approx(0.905)
    assert fp32.estimates["eval/accuracy"].mean == pytest.approx(0.867)
    assert (bf16.estimates["steps_per_s"].mean, bf16.estimates["tokens_per_s"].mean) == (2.0, 2000.0)
    assert bf16.estimates["memory/peak_bytes"].mean == 2**28 + 20
    assert bf16.estimates["mismatch/abs_mean"].mean == pytest.approx(4e-3)
    assert bf16.estimates["fp16/skipped_total"].n == 0


def test_the_declared_precision_sites_are_four_separate_columns(tmp_path: Path) -> None:
    """A8"""
    sites = {"precision.declared.rollout": "bf16", "precision.declared.head": "fp32"}
    write_run(tmp_path, precision="fp16", manifest=sites)
    write_run(tmp_path, precision="fp16", seed=1, manifest=sites | {"precision.declared.head": "fp16"})
    (arm,) = summary_of(tmp_path).arms
    assert arm.sites == {"params": "fp32", "compute": "fp16", "rollout": "bf16", "head": "fp16/fp32"}


def test_differences_are_paired_with_the_declared_baseline(tmp_path: Path) -> None:
    write_sweep(tmp_path)
    summary = summary_of(tmp_path)
    assert (summary.baseline, summary.baseline_origin) == ("precision=fp32", "declared by the sweep")
    assert [item.arm for item in summary.comparisons] == ["precision=bf16", "precision=fp16"]
    found = summary.comparisons[1].difference
    assert found is not None
    assert (found.kind, found.n, rounded(found.mean)) == (DifferenceKind.paired, 2, -0.012)


def test_the_first_arm_is_the_baseline_where_none_is_declared_or_was_run(tmp_path: Path) -> None:
    for precision in ("bf16", "fp16"):
        write_run(tmp_path, precision=precision)
    assert summary_of(tmp_path).baseline_origin == "the first arm, as none is declared"
    assert summary_of(tmp_path).baseline == "precision=bf16"
    write_run(tmp_path, seed=1, baseline="precision=fp32")
    assert "no run of the declared baseline precision=fp32: compared with precision=bf16" in summary_of(tmp_path).notes
    assert summary_of(tmp_path, "precision=fp16").baseline_origin == "as asked"


def test_only_done_runs_enter_a_mean_and_the_others_stay_in_the_total(tmp_path: Path) -> None:
    write_troubled_sweep(tmp_path)
    summary = summary_of(tmp_path)
    counts = {arm.arm.name: (len(arm.arm.done), len(arm.arm.runs)) for arm in summary.arms}
    assert counts == {"precision=bf16": (4, 5), "precision=fp16": (4, 5), "precision=fp32": (3, 5)}
    assert {item.run.state.value for item in summary.not_counted} == {
        "crashed", "failed", "preempted", "created", "broken"
    }  # fmt: skip


def test_a_last_value_that_is_no_number_is_left_out_and_said(tmp_path: Path) -> None:
    rows = metric_rows("bf16", 1)
    rows[-1]["eval/accuracy"] = None
    write_run(tmp_path, seed=0)
    write_run(tmp_path, seed=1, rows=rows)
    write_run(tmp_path, seed=2, rows=[{"step": 1, "wall_s": 1.0}])
    summary = summary_of(tmp_path)
    assert (summary.arms[0].estimates["eval/accuracy"].n, summary.arms[0].num_seeds) == (1, 3)
    assert summary.notes[:2] == (
        "eval/accuracy: not a number in precision=bf16-seed=1; left out of the mean",
        "eval/accuracy: missing in precision=bf16-seed=2; left out of the mean",
    )


def test_two_runs_of_one_arm_and_seed_count_once(tmp_path: Path) -> None:
    for name, gain in (("a", 0.0), ("b", 0.02)):
        write_run(tmp_path, name, gain=gain)
    summary = summary_of(tmp_path)
    found = summary.arms[0].estimates["eval/accuracy"]
    assert (found.n, rounded(found.mean)) == (1, 0.86)
    assert "precision=bf16 has 2 runs of seed 0 (a, b): averaged, and counted once" in summary.notes


def test_runs_of_different_lengths_are_said_to_be(tmp_path: Path) -> None:
    for seed, steps in ((0, 20), (1, 30)):
        write_run(tmp_path, seed=seed, num_steps=steps)
    assert "the runs end at different steps, from 20 to 30" in summary_of(tmp_path).notes


def test_another_metric_is_compared_on_request(tmp_path: Path) -> None:
    write_sweep(tmp_path, ["bf16", "fp32"])
    (item,) = summary_of(tmp_path, metric="mismatch/abs_mean").comparisons
    assert item.difference is not None
    assert item.difference.mean == pytest.approx(4e-3 - 2e-7)


def test_the_metric_is_the_one_the_sweep_declares(tmp_path: Path) -> None:
    write_run(tmp_path, config={"sweep.metric": "eval/reward"})
    assert summary_of(tmp_path).metric == "eval/reward"


def test_a_metric_that_no_run_has_is_a_user_error_with_near_names(tmp_path: Path) -> None:
    write_run(tmp_path)
    with pytest.raises(ConfigError, match=r"metric='eval/acuracy': allowed: eval/accuracy"):
        summary_of(tmp_path, metric="eval/acuracy")
    with pytest.raises(ConfigError, match=r"metric='nope': allowed: eval/accuracy, .*ratio/clip_frac"):
        summary_of(tmp_path, metric="nope")


def test_the_mismatch_is_shown_taken_apart_where_runs_have_probed_it(tmp_path: Path) -> None:
    write_run(tmp_path, precision="fp32")
    assert [part.title for part in sections(summary_of(tmp_path)) if "taken apart" in part.title] == []
    rows = metric_rows("bf16")
    for row, size in ((rows[10], 0.25), (rows[20], 0.75)):
        row |= dict.fromkeys(DECOMPOSITION, size)
    write_run(tmp_path, precision="bf16", rows=rows)
    [grid] = [part for part in sections(summary_of(tmp_path)) if "taken apart" in part.title]
    assert isinstance(grid, Grid)
    assert grid.header == ("arm", "alpha", "beta", "beta_dtype", "beta_batch",
                           "beta_engine", "phantom_clip")  # fmt: skip
    assert grid.rows == (("precision=bf16", *["0.500"] * 6),)
