"""Grouping into arms, baselines, and the confound check."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from run_folders import write_run, write_sweep

from grpo_exp.errors import ConfigError
from grpo_exp.report.arms import Design, design, find_baselines
from grpo_exp.report.confounds import Confound, Source, Spread, find_confounds
from grpo_exp.report.load import find_runs

ARMS = ("bf16", "fp16", "fp32")


def arms_of(root: Path) -> Design:
    return design(find_runs([root]))


def confounds_of(root: Path) -> list[Confound]:
    plan = arms_of(root)
    return find_confounds(plan.arms, plan.factors)


def names(plan: Design) -> list[str]:
    return [arm.name for arm in plan.arms]


def test_runs_are_grouped_by_the_declared_factors_but_the_seed(tmp_path: Path) -> None:
    """F12"""
    write_sweep(tmp_path, ARMS, (0, 1, 10, 2))
    plan = arms_of(tmp_path)
    assert (plan.factors, plan.is_declared) == (("precision",), True)
    assert names(plan) == ["precision=bf16", "precision=fp16", "precision=fp32"]
    assert [run.seed for run in plan.arms[0].runs] == ["0", "1", "2", "10"]


def test_a_factor_that_a_run_does_not_declare_is_read_from_its_choices_and_config(tmp_path: Path) -> None:
    write_run(tmp_path, "a", factors={"optim.lr": "1e-5"}, config={"optim.lr": 1e-5})
    write_run(tmp_path, "b", factors={"optim.lr": "0.00001", "precision": "bf16"}, config={"optim.lr": 0.00001})
    write_run(tmp_path, "c", factors={"seed": "0"}, precision="fp32", config={"optim.lr": 0.1})
    write_run(tmp_path, "d", factors={"new.key": "7"}, precision="fp32", config={"optim.lr": 0.1})
    plan = arms_of(tmp_path)
    assert plan.factors == ("new.key", "optim.lr", "precision")
    assert names(plan) == [
        "new.key=7,optim.lr=0.1,precision=fp32",
        "new.key=–,optim.lr=1e-05,precision=bf16",
        "new.key=–,optim.lr=0.1,precision=fp32",
    ]


def test_a_factor_with_one_level_stays_out_of_the_names(tmp_path: Path) -> None:
    for precision in ("bf16", "fp32"):
        write_run(tmp_path, precision, precision=precision, factors={"precision": precision, "task": "reverse"})
    assert names(arms_of(tmp_path)) == ["precision=bf16", "precision=fp32"]


def test_numeric_levels_are_sorted_by_value(tmp_path: Path) -> None:
    for staleness in (10, 2, 1):
        write_run(
            tmp_path,
            f"s{staleness}",
            factors={"rollout.max_staleness": str(staleness)},
            config={"rollout.max_staleness": staleness},
        )
    assert names(arms_of(tmp_path)) == [f"rollout.max_staleness={n}" for n in (1, 2, 10)]


def test_without_declared_factors_the_choices_that_differ_make_the_arms(tmp_path: Path) -> None:
    for precision, tracker in (("bf16", "none"), ("fp32", "wandb")):
        write_run(tmp_path, precision, precision=precision, factors={}, manifest={"choices.tracker": tracker})
    plan = arms_of(tmp_path)
    assert (plan.factors, plan.is_declared, names(plan)) == (
        ("precision",),
        False,
        ["precision=bf16", "precision=fp32"],
    )


def test_a_single_run_is_one_arm(tmp_path: Path) -> None:
    write_run(tmp_path, factors={})
    assert names(arms_of(tmp_path)) == ["all runs"]


def test_broken_runs_fit_in_no_arm_and_are_kept_apart(tmp_path: Path) -> None:
    write_sweep(tmp_path, ["bf16"])
    (tmp_path / "precision=bf16-seed=1" / "manifest.json").unlink()
    plan = arms_of(tmp_path)
    assert (len(plan.arms[0].runs), [run.name for run in plan.broken]) == (1, ["precision=bf16-seed=1"])


def two_factors(root: Path, pairs: Sequence[tuple[str, str]]) -> Design:
    for precision, name in pairs:
        factors = {"precision": precision, "correction": name}
        manifest = {"choices.correction": name}
        write_run(root, f"{precision}-{name}", precision=precision, factors=factors, manifest=manifest)
    return arms_of(root)


def test_a_baseline_of_one_factor_is_applied_within_the_levels_of_the_others(tmp_path: Path) -> None:
    plan = two_factors(tmp_path, [("bf16", "none"), ("fp32", "none"), ("bf16", "tis"), ("fp32", "tis"), ("bf16", "x")])
    found = find_baselines(plan.arms, "precision=fp32")
    assert {name: arm and arm.name for name, arm in found.items()} == {
        "correction=none,precision=bf16": "correction=none,precision=fp32",
        "correction=none,precision=fp32": "correction=none,precision=fp32",
        "correction=tis,precision=bf16": "correction=tis,precision=fp32",
        "correction=tis,precision=fp32": "correction=tis,precision=fp32",
        "correction=x,precision=bf16": None,
    }


def test_a_baseline_that_names_an_arm_is_the_same_for_all(tmp_path: Path) -> None:
    plan = two_factors(tmp_path, [("bf16", "none"), ("fp32", "none"), ("bf16", "tis")])
    for text in ("correction=none,precision=fp32", "precision=fp32,correction=none"):
        assert {arm and arm.name for arm in find_baselines(plan.arms, text).values()} == {
            "correction=none,precision=fp32"
        }


def test_a_baseline_level_may_be_written_as_another_spelling_of_the_number(tmp_path: Path) -> None:
    for lr in (1e-5, 1e-3):
        write_run(tmp_path, f"{lr}", factors={"optim.lr": str(lr)}, config={"optim.lr": lr})
    baseline = find_baselines(arms_of(tmp_path).arms, "optim.lr=0.00001")["optim.lr=0.001"]
    assert baseline is not None
    assert baseline.name == "optim.lr=1e-05"


@pytest.mark.parametrize("text", ["precision=int8", "fp32", "", "seed=0"])
def test_a_baseline_that_no_arm_is_names_the_arms(tmp_path: Path, text: str) -> None:
    write_sweep(tmp_path, ["bf16", "fp32"])
    with pytest.raises(ConfigError, match="precision=bf16, precision=fp32"):
        find_baselines(arms_of(tmp_path).arms, text)


def test_the_factor_and_what_it_implies_are_no_confounds(tmp_path: Path) -> None:
    write_sweep(tmp_path, ARMS, (0, 1, 2))
    assert confounds_of(tmp_path) == []


@pytest.mark.parametrize(
    ("config", "manifest", "key", "source"),
    [
        ({"trainer.eval_every": 25}, {}, "trainer.eval_every", Source.config),
        ({"optim.lr": 1e-3}, {}, "optim.lr", Source.config),
        ({"rollout.new_option": 1}, {}, "rollout.new_option", Source.config),
        ({}, {"versions.torch": "2.12.1"}, "versions.torch", Source.manifest),
        ({}, {"versions.vllm": "0.32.0"}, "versions.vllm", Source.manifest),
        ({}, {"generator.version": "0.32.0"}, "generator.version", Source.manifest),
        ({}, {"git.commit": "fedcba9"}, "git.commit", Source.manifest),
        ({}, {"git.dirty": True}, "git.dirty", Source.manifest),
        ({}, {"hardware.gpus": ["NVIDIA H200"]}, "hardware.gpus", Source.manifest),
        ({}, {"hardware.memory_bytes": 8 * 2**30}, "hardware.memory_bytes", Source.manifest),
    ],
)
def test_an_injected_difference_between_arms_is_found(
    tmp_path: Path, config: dict[str, object], manifest: dict[str, object], key: str, source: Source
) -> None:
    for seed in (0, 1):
        write_run(tmp_path, precision="fp32", seed=seed)
        write_run(tmp_path, precision="bf16", seed=seed, config=config, manifest=manifest)
    (found,) = confounds_of(tmp_path)
    assert (found.key, found.source, found.spread, found.confounds) == (key, source, Spread.between, True)
    assert {arm: len(values) for arm, values in found.values.items()} == {"precision=bf16": 1, "precision=fp32": 1}


@pytest.mark.parametrize(
    ("config", "manifest"),
    [
        ({"runs_dir": "elsewhere"}, {}),
        ({"tracker.name": "wandb", "tracker.tags": ["x"]}, {}),
        ({"sweep.name": "other"}, {}),
        ({"repeat": 1}, {}),
        ({}, {"generator.first_sync.beta_abs_mean": 4e-3}),
        ({}, {"run.created": "2027", "overrides": [], "choices.hydra/launcher": "slurm"}),
        ({}, {"hardware.host": "another", "hardware.memory_bytes": 16 * 2**30 + 12345}),
    ],
)
def test_what_changes_no_result_is_no_confound(
    tmp_path: Path, config: dict[str, object], manifest: dict[str, object]
) -> None:
    write_run(tmp_path, precision="fp32")
    write_run(tmp_path, precision="bf16", config=config, manifest=manifest)
    assert confounds_of(tmp_path) == []


def test_a_group_factor_covers_its_own_block_and_no_other(tmp_path: Path) -> None:
    for rollout in ("hf", "vllm"):
        write_run(
            tmp_path,
            rollout,
            factors={"rollout": rollout},
            config={"rollout.backend": rollout, "rollout_extra": rollout, "task.length": 6 if rollout == "hf" else 7},
            manifest={"choices.rollout": rollout},
        )
    assert [found.key for found in confounds_of(tmp_path)] == ["rollout_extra", "task.length"]


def test_observed_dtypes_that_differ_under_another_factor_are_confounds(tmp_path: Path) -> None:
    for correction in ("none", "tis"):
        write_run(
            tmp_path,
            correction,
            factors={"correction": correction},
            config={"correction.name": correction},
            manifest={"choices.correction": correction, "precision.observed.startup.rollout": correction},
        )
    assert [found.key for found in confounds_of(tmp_path)] == ["precision.observed.startup.rollout"]


def test_a_single_site_as_factor_covers_that_site_and_the_observed_dtypes(tmp_path: Path) -> None:
    for dtype in ("bf16", "fp32"):
        write_run(
            tmp_path,
            dtype,
            factors={"precision.rollout": dtype},
            config={"precision.rollout": dtype, "precision.matmul": "high" if dtype == "bf16" else "highest"},
            manifest={"precision.declared.wire": dtype},
        )
    assert [found.key for found in confounds_of(tmp_path)] == ["precision.matmul"]


def test_a_difference_that_goes_with_the_seed_is_reported_but_confounds_nothing(tmp_path: Path) -> None:
    for precision in ("bf16", "fp32"):
        for seed in (0, 1):
            write_run(tmp_path, precision=precision, seed=seed, config={"task.seed": seed})
    (found,) = confounds_of(tmp_path)
    assert (found.key, found.spread, found.confounds) == ("task.seed", Spread.within, False)


def test_a_difference_in_one_run_of_an_arm_confounds(tmp_path: Path) -> None:
    for precision in ("bf16", "fp32"):
        for seed in (0, 1):
            commit = "other" if (precision, seed) == ("bf16", 1) else "same"
            write_run(tmp_path, precision=precision, seed=seed, manifest={"git.commit": commit})
    (found,) = confounds_of(tmp_path)
    assert (found.spread, found.values) == (
        Spread.mixed,
        {"precision=bf16": ("other", "same"), "precision=fp32": ("same",)},
    )


def test_a_manifest_that_is_not_complete_yet_is_no_confound(tmp_path: Path) -> None:
    write_run(tmp_path, precision="fp32")
    write_run(tmp_path, precision="fp32", seed=1)
    queued = write_run(tmp_path, precision="bf16", state="created", rows=[])
    text = '{"sweep": {"factors": {"precision": "bf16", "seed": "0"}}, "choices": {"precision": "bf16"}}'
    (queued / "manifest.json").write_text(text)
    assert confounds_of(tmp_path) == []
