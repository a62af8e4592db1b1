"""A sweep of two precisions and two seeds, again, with a seed more, in the other order, and each arm alone.

Runs are real and as small as they can be; the scenario is played once and looked at by several tests.
"""

import json
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest
from commands import PROGRAM, SMALL, Command, Ended, command, in_a_terminal, runs
from small_runs import metrics, repeatable, small_trainer, status


@dataclass(frozen=True)
class Story:
    folder: Path
    first: Ended
    again: Ended
    more: Ended
    other_order: Ended
    in_a_terminal: tuple[int, str]


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Story:
    folder = tmp_path_factory.mktemp("story")
    sweep = ("-m", *SMALL, "precision=fp32,bf16", "hydra.launcher.n_jobs=2", "sweep.baseline='precision=fp32'")
    first = command(*sweep, "seed=0,1", cwd=folder)
    again = command(*sweep, "seed=0,1", cwd=folder)
    more = Command(*SMALL, "-m", "precision=fp32", "seed=0,1,2", cwd=folder)
    other = Command(*SMALL, "-m", "precision=bf16,fp32", "seed=0", "runs_dir=other", cwd=folder)
    ended = more.end(), other.end()
    alone = in_a_terminal([PROGRAM, *SMALL, "precision=fp32", "seed=0", "runs_dir=alone_fp32"], folder)
    small_trainer(folder / "alone_bf16" / "by_the_library", *SMALL[1:], "precision=bf16", "seed=0").train()
    return Story(folder, first, again, *ended, alone)


def test_every_run_of_a_sweep_has_a_process_and_a_folder_of_its_own(story: Story) -> None:
    """F12: the name says what varied."""
    assert story.first.code == 0, story.first.err
    found = runs(story.folder / "runs")
    assert set(found) - {"seed-2"} == {f"precision-{p}_seed-{s}" for p in ("fp32", "bf16") for s in (0, 1)}
    statuses = [status(path) for path in found.values()]
    assert {one["state"] for one in statuses} == {"done"}
    assert len({one["pid"] for one in statuses}) == len(found)
    for path in found.values():
        assert [row["step"] for row in metrics(path)] == [0, 1, 2]


def test_two_runs_go_on_at_a_time(story: Story) -> None:
    words = [line.partition(": ")[2] for line in story.first.err.splitlines()]
    assert words[:2] == ["started", "started"]
    assert sorted(words) == ["done"] * 4 + ["started"] * 4
    at_once = [words[:n].count("started") - words[:n].count("done") for n in range(len(words) + 1)]
    assert max(at_once) == 2


def test_the_manifest_knows_sweep_factors_choices_and_overrides(story: Story) -> None:
    """F12."""
    path = runs(story.folder / "runs")["precision-bf16_seed-1"]
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["sweep"]["factors"] == {"precision": "bf16", "seed": "1"}
    assert manifest["sweep"]["baseline"] == "precision=fp32"
    assert manifest["choices"]["precision"] == "bf16"
    assert "precision=bf16" in manifest["overrides"]
    assert manifest["run"]["config_hash"] == path.name.rpartition("_")[2]
    assert manifest["precision"]["observed"]["first_step"]["compute"] == "bf16"


def test_a_sweep_ends_with_the_comparison_on_standard_output(story: Story) -> None:
    assert "4 runs: 4 done" in story.first.out
    assert "precision=bf16" in story.first.out
    assert "minus the baseline precision=fp32" in story.first.out
    assert "Confound check\n  ok" in story.first.out


def test_the_same_command_again_skips_what_is_done_and_says_so(story: Story) -> None:
    assert story.again.code == 0
    assert [line.partition(": ")[2] for line in story.again.err.splitlines()] == ["done already"] * 4
    assert "4 runs: 4 done" in story.again.out
    assert story.again.wall_s < 15, "it takes seconds"


def test_one_seed_more_is_one_run_more(story: Story) -> None:
    assert story.more.code == 0, story.more.err
    words = [line.partition(": ")[2] for line in story.more.err.splitlines()]
    assert words == ["done already", "done already", "started", "done"]
    assert "3 runs: 3 done" in story.more.out


def test_neither_the_order_nor_the_company_of_an_arm_changes_its_metrics(story: Story) -> None:
    """E16: in lockstep, the same to the last bit, times and memory aside. One arm alone is run by the library."""
    assert story.other_order.code == 0, story.other_order.err
    for name in ("fp32", "bf16"):
        rows = [
            repeatable(metrics(runs(story.folder / "runs")[f"precision-{name}_seed-0"])),
            repeatable(metrics(runs(story.folder / "other")[f"precision-{name}"])),
            *(repeatable(metrics(path)) for path in (story.folder / f"alone_{name}").glob("[!.]*")),
        ]
        assert [len(row) for row in rows] == [3, 3, 3]
        assert rows[1:] == [rows[0], rows[0]]
    hashes = {path.name.rpartition("_")[2] for path in story.folder.glob("*/precision-fp32_seed-0_*")}
    assert {path.name.rpartition("_")[2] for path in story.folder.glob("alone_fp32/run_*")} == hashes


def test_arms_and_seeds_do_differ(story: Story) -> None:
    found = runs(story.folder / "runs")
    rows = {name: repeatable(metrics(path)) for name, path in found.items()}
    names = sorted(rows)
    assert all(rows[a] != rows[b] for a, b in pairwise(names))


def test_a_single_run_in_a_terminal_shows_a_live_bar_and_its_folder(story: Story) -> None:
    code, shown = story.in_a_terminal
    assert code == 0
    assert "run folder: " in shown
    assert "2/2" in shown
    assert "2 steps: eval/accuracy" in shown


def test_nothing_is_left_beside_the_run_folders(story: Story) -> None:
    """E5."""
    assert {path.name for path in story.folder.iterdir()} == {"runs", "other", "alone_fp32", "alone_bf16"}
    for name in ("runs", "other"):
        assert {path.name for path in (story.folder / name).iterdir() if path.name.startswith(".")} == {".lock"}


def test_no_placeholder_is_left_in_a_frozen_configuration(story: Story) -> None:
    """E13."""
    text = (runs(story.folder / "runs")["precision-fp32_seed-0"] / "config.yaml").read_text()
    assert "${" not in text
    assert "???" not in text
