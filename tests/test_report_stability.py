"""The stability of arms: what is not finite, what is skipped, and the runs that have not collapsed."""

from pathlib import Path

from run_folders import metric_rows, write_run

from grpo_exp.report.charts import tick
from grpo_exp.report.load import find_runs
from grpo_exp.report.stability import first_not_finite, share_not_collapsed, stability_table
from grpo_exp.report.tables import summarise
from grpo_exp.report.verdict import Rules


def runs_of(tmp_path: Path, *curves: list[float], state: str = "done") -> None:
    for seed, curve in enumerate(curves):
        rows = [{"step": step, "eval/accuracy": value} for step, value in enumerate(curve)]
        write_run(tmp_path, f"{state}{seed}", seed=seed, rows=rows, state=state)


def test_the_share_falls_when_a_run_loses_more_than_the_rule_allows_and_rises_when_it_comes_back(
    tmp_path: Path,
) -> None:
    runs_of(tmp_path, [0.2, 0.6, 1.0], [0.2, 1.0, 0.3], [0.2, 1.0, 0.9])
    found = share_not_collapsed(find_runs([tmp_path]), "eval/accuracy", Rules(collapse=0.5))
    assert found == [(0.0, 1.0), (1.0, 1.0), (2.0, 2 / 3)]


def test_a_failed_run_counts_as_collapsed_once_it_has_ended_and_a_stopped_one_not_at_all(tmp_path: Path) -> None:
    runs_of(tmp_path, [0.2, 0.6, 1.0])
    runs_of(tmp_path, [0.2, 0.6], state="failed")
    runs_of(tmp_path, [0.2, 0.6], state="preempted")
    found = share_not_collapsed(find_runs([tmp_path]), "eval/accuracy", Rules())
    assert found == [(0.0, 1.0), (1.0, 1.0), (2.0, 0.5)]


def test_the_table_names_the_first_step_that_is_not_finite(tmp_path: Path) -> None:
    rows = metric_rows("fp16", 0, 5)
    rows[3]["grad/norm"] = None
    rows[4]["fp16/scale"] = 32768.0
    write_run(tmp_path, precision="fp16", rows=rows)
    write_run(tmp_path, precision="bf16", num_steps=5)
    runs = find_runs([tmp_path])
    assert {first_not_finite(run.metrics) for run in runs} == {3.0, None}
    table = stability_table(summarise(runs).arms)
    assert table.rows == (
        ("precision=bf16", "–", "–", "0.500", "none", "1 / 1"),
        ("precision=fp16", "32768", "1", "0.500", "step 3 (1 / 1)", "1 / 1"),
    )


def test_ticks_are_short_whatever_the_size() -> None:
    values = [65536, -1.2345e7, 4.2e-5, -0.00123456, 0, 150.4, 9999.5, 1e16, -9.9e-300]
    assert max(len(tick(value)) for value in values) <= 8
    assert [tick(value) for value in values[:4]] == ["65.5k", "-12.3M", "4.2e-05", "-0.00123"]
