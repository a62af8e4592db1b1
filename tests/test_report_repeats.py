"""The same arm twice, as the comparison reports it; and aggregates over task × seed cells."""

import json
from pathlib import Path

import pytest
from run_folders import metric_rows, write_run
from test_report_html import Tags

from grpo_exp.report.compare import main
from grpo_exp.report.load import find_runs
from grpo_exp.report.tables import Summary, summarise


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def twice(gains: tuple[float, ...] = (0.01, 0.03, -0.01), baseline: str | None = "precision=fp32") -> Summary:
    """fp32 and bf16 over three seeds, and fp32 again with these gains."""
    for seed, gain in enumerate(gains):
        again = {"precision": "fp32", "seed": str(seed), "repeat": "1"}
        write_run(Path("runs"), precision="fp32", seed=seed, baseline=baseline)
        write_run(Path("runs"), precision="bf16", seed=seed, gain=0.05, baseline=baseline)
        write_run(Path("runs"), f"again{seed}", precision="fp32", seed=seed, gain=gain, factors=again,
                  config={"repeat": 1}, baseline=baseline)  # fmt: skip
    return summarise(find_runs([Path("runs")]))


def test_an_arm_that_ran_twice_is_two_arms_of_which_the_first_keeps_its_name() -> None:
    summary = twice()
    assert [arm.arm.name for arm in summary.arms] == ["precision=bf16", "precision=fp32", "precision=fp32,repeat=1"]
    assert not summary.is_confounded


@pytest.mark.parametrize("baseline", ["precision=fp32", None])
def test_the_second_time_enters_no_comparison_and_no_adjustment(baseline: str | None) -> None:
    summary = twice(baseline=baseline)
    assert len(summary.comparisons) == 1
    assert summary.comparisons[0].evidence.holm == summary.comparisons[0].evidence.p


def test_the_noise_is_the_difference_of_the_two_by_seed() -> None:
    [found] = twice().repeats
    assert (found.arm, found.of, found.num_shared) == ("precision=fp32,repeat=1", "precision=fp32", 3)
    assert found.difference.mean == pytest.approx(0.01)
    assert found.difference.interval is not None
    assert found.difference.interval.half_width == pytest.approx(4.302653 * 0.02 / 3**0.5, rel=1e-6)
    assert found.largest == pytest.approx(0.03)


@pytest.mark.parametrize("option", ["", "--md", "--json", "--html"])
def test_every_output_says_how_far_the_same_arm_twice_is_apart(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    twice()
    assert main(["runs", *([option] if option else []), *(["page.html"] if option == "--html" else [])]) == 0
    out = Tags(Path("page.html").read_text()).text if option == "--html" else capsys.readouterr().out
    if option == "--json":
        [found] = json.loads(out)["repeats"]
        assert (found["n"], found["of"], found["largest"]) == (3, "precision=fp32", pytest.approx(0.03))
    else:
        assert "precision=fp32: the same arm twice differs in eval/accuracy by +0.01, 95% interval" in out
        assert "3 shared seeds; at most 0.03 at one seed" in out


def test_equal_runs_differ_by_nothing_and_unfinished_ones_by_a_dash() -> None:
    assert twice((0.0, 0.0)).repeats[0].in_words("m", 0.95).endswith("differs in m by 0 at 2 shared seeds")
    for path in Path("runs").glob("again*/status.json"):
        path.write_text(path.read_text().replace('"done"', '"preempted"'))
    [found] = summarise(find_runs([Path("runs")])).repeats
    assert "no seed has both" in found.in_words("m", 0.95)


def test_two_seeds_of_three_arms_are_no_repeat() -> None:
    for precision in ("fp32", "bf16"):
        write_run(Path("runs"), precision=precision)
    assert summarise(find_runs([Path("runs")])).repeats == ()


def cells(num_seeds: int, tasks: tuple[str, ...]) -> None:
    for task in tasks:
        for seed in range(num_seeds):
            for precision in ("fp32", "bf16"):
                factors = {"precision": precision, "task": task, "seed": str(seed)}
                gain = 0.1 if precision == "bf16" else 0.0
                write_run(Path("runs"), f"{precision}{task}{seed}", precision=precision, seed=seed, factors=factors,
                          manifest={"choices.task": task}, rows=metric_rows(precision, seed % 10, 3, gain),
                          baseline="precision=fp32")  # fmt: skip


def test_aggregates_are_shown_from_twenty_cells_on_with_tasks_put_together(capsys: pytest.CaptureFixture[str]) -> None:
    cells(10, ("reverse", "sort"))
    assert main(["runs", "--json"]) == 0
    [found] = json.loads(capsys.readouterr().out)["aggregates"]
    assert (found["arm"], found["baseline"], found["num_cells"]) == ("precision=bf16", "precision=fp32", 20)
    assert found["iqm"] == pytest.approx(0.995)  # the middle of 0.95 … 1.04, twice
    assert found["improvement"] == 1.0  # 0.95 is above each of 0.85 … 0.94
    assert main(["runs"]) == 0
    assert "P(better)" in capsys.readouterr().out


def test_below_twenty_cells_the_reason_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    cells(9, ("reverse", "sort"))
    assert main(["runs", "--json"]) == 0
    assert "fewer than 20" in json.loads(capsys.readouterr().out)["aggregates"][0]["refused"]
    assert main(["runs"]) == 0
    out = capsys.readouterr().out
    assert "not shown, 18 here: fewer than 20 task × seed cells" in out
    assert "P(better)" not in out
