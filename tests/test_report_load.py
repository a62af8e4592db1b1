"""Reading run folders in every state a cluster leaves them in."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from run_folders import metric_rows, write_run, write_sweep

from grpo_exp.errors import ConfigError
from grpo_exp.folder import now
from grpo_exp.report.load import RunState, find_runs, flatten, read_run, section
from grpo_exp.report.metrics import Json, Metrics, Section, read_metrics


def dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_a_run_folder_is_read_whole(tmp_path: Path) -> None:
    folder = write_run(tmp_path, precision="bf16", seed=3)
    (run,) = find_runs([folder])
    assert (run.name, run.path, run.state, run.reason, run.seed) == (folder.name, folder, RunState.done, None, "3")
    assert run.config["seed"] == 3
    assert section(run.manifest, "choices")["precision"] == "bf16"
    assert len(run.metrics.rows) == 21


def test_runs_are_found_at_any_depth_once_and_in_order(tmp_path: Path) -> None:
    write_sweep(tmp_path / "b" / "inner", ["fp32"])
    write_sweep(tmp_path / "a", ["bf16"], [0])
    (tmp_path / "a" / "precision=bf16-seed=0" / "checkpoints" / "step_10").mkdir()
    (tmp_path / "a" / "precision=bf16-seed=0" / "checkpoints" / "step_10" / "config.yaml").write_text("seed: 0\n")
    found = [run.path.relative_to(tmp_path) for run in find_runs([tmp_path, tmp_path / "a"])]
    assert [str(path) for path in found] == [
        "a/precision=bf16-seed=0",
        "b/inner/precision=fp32-seed=0",
        "b/inner/precision=fp32-seed=1",
    ]


def test_links_are_followed_and_loops_end(tmp_path: Path) -> None:
    write_sweep(tmp_path / "elsewhere", ["fp32"], [0])
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "sweep").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "again").symlink_to(tmp_path / "runs")
    assert len(find_runs([tmp_path / "runs"])) == 1


def test_a_primary_config_of_hydra_is_no_run(tmp_path: Path) -> None:
    for folder in (tmp_path / "conf", tmp_path / "outputs" / ".hydra"):
        folder.mkdir(parents=True)
        (folder / "config.yaml").write_text("defaults:\n  - _self_\nseed: 0\n")
    write_run(tmp_path)
    assert len(find_runs([tmp_path])) == 1


@pytest.mark.parametrize(
    ("name", "expected"), [("nope", "no such folder"), ("file", "not a folder"), ("empty", "no run")]
)
def test_a_path_without_runs_is_a_user_error(tmp_path: Path, name: str, expected: str) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=expected):
        find_runs([tmp_path / name])


def test_a_running_run_whose_process_is_gone_is_shown_as_crashed(tmp_path: Path) -> None:
    """F8"""
    pid = dead_pid()
    dead = write_run(tmp_path, "dead", state="running", status={"pid": pid})
    alive = write_run(tmp_path, "alive", state="running", status={"pid": os.getpid()})
    far = {"pid": pid, "host": "another-host"}
    remote = write_run(tmp_path, "remote", state="running", status=far | {"heartbeat": now()})
    silent = write_run(tmp_path, "silent", state="running", status=far)
    ended = write_run(tmp_path, "ended", state="preempted", status={"pid": pid})
    states = [read_run(folder).state for folder in (dead, alive, remote, silent, ended)]
    assert states == [
        RunState.crashed, RunState.running, RunState.running, RunState.crashed, RunState.preempted,
    ]  # fmt: skip
    assert read_run(dead).reason == f"its process {pid} is gone"


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("manifest.json", None, "manifest.json is missing"),
        ("manifest.json", "{", "manifest.json is not valid json"),
        ("manifest.json", "[1]", "manifest.json holds no mapping"),
        ("status.json", "", "status.json is not valid json"),
        ("status.json", '{"state": "sleeping"}', "unknown state 'sleeping'"),
        ("status.json", '{"state": ["done"]}', "unknown state"),
        ("config.yaml", "a: [", "config.yaml is not valid yaml"),
        ("config.yaml", "", "config.yaml is empty"),
        ("config.yaml", b"\xff\xfe", "config.yaml cannot be read"),
    ],
)
def test_a_folder_that_cannot_be_understood_is_listed_as_broken(
    tmp_path: Path, name: str, content: str | bytes | None, expected: str
) -> None:
    folder = write_run(tmp_path)
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    (run,) = find_runs([tmp_path])
    assert run.state is RunState.broken
    assert run.reason is not None
    assert expected in run.reason
    assert "\n" not in run.reason


def test_a_manifest_with_other_types_than_expected_is_no_crash(tmp_path: Path) -> None:
    folder = write_run(tmp_path)
    (folder / "manifest.json").write_text('{"run": null, "sweep": 3, "choices": [1], "precision": "bf16"}')
    assert read_run(folder).name == folder.name


def test_a_torn_last_line_is_left_out_and_other_bad_lines_are_reported(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "a": 1.0}\n{"step": 2, "a": 2.0}\n{"step": 3, "a"')
    torn = read_metrics(path)
    assert (torn.last("step"), torn.problems) == (2.0, ())
    path.write_text('{"step": 1, "a": 1.0}\n{"step": 2\n[3]\n\n{"step": 4, "a": 4.0}\n')
    bad = read_metrics(path)
    assert [row["step"] for row in bad.rows] == [1, 4]
    assert bad.problems == ("metrics.jsonl line 2 is not a JSON object", "metrics.jsonl line 3 is not a JSON object")


def test_a_whole_last_line_counts_without_its_newline(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}')
    assert read_metrics(path).last("step") == 2.0


def test_two_rows_on_one_line_are_reported(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1},{"step": 2}\n{"step": 3}\n')
    assert read_metrics(path).problems == ("metrics.jsonl line 1 is not a JSON object",)


def test_missing_metrics_are_a_problem_of_that_run_only(tmp_path: Path) -> None:
    folder = write_run(tmp_path)
    (folder / "metrics.jsonl").unlink()
    metrics = read_run(folder).metrics
    assert (metrics.rows, metrics.last("eval/accuracy")) == ((), None)
    assert metrics.problems == ("metrics.jsonl cannot be read (No such file or directory)",)


def test_what_is_no_number_is_a_gap_and_never_replaced_by_an_older_value() -> None:
    values: list[Json] = [1.0, None, "text", True, float("nan"), float("inf"), 10**400, 2, {"a": 1}]
    metrics = Metrics(tuple({"step": step, "x": value} for step, value in enumerate(values)))
    assert metrics.column("x") == [1.0, None, None, None, None, None, None, 2.0, None]
    assert (metrics.first("x"), metrics.last("x"), metrics.mean("x"), metrics.highest("x")) == (1.0, None, 1.5, 2.0)


def test_nan_literals_are_read_as_gaps(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "a": NaN, "b": -Infinity}\n')
    assert read_metrics(path).rows == ({"step": 1, "a": None, "b": None},)


def test_sparse_and_last_values_are_exact_in_a_long_run(tmp_path: Path) -> None:
    """F10"""
    rows = [{"step": step, "loss/policy": 1 / step} for step in range(1, 2001)]
    for row in rows:
        if row["step"] % 100 == 0:
            row["eval/accuracy"] = row["step"] / 3000 + (0.5 if row["step"] == 1300 else 0)
    for name in ("a", "b"):
        write_run(tmp_path, name, rows=rows)
    for run in find_runs([tmp_path]) * 2:
        assert run.metrics.last("step") == 2000
        assert [step for step, _ in run.metrics.series("eval/accuracy")] == list(range(100, 2001, 100))
        assert run.metrics.last("eval/accuracy") == 2000 / 3000
        assert run.metrics.highest("eval/accuracy") == 1300 / 3000 + 0.5
        assert len(run.metrics.column("loss/policy")) == 2000


def test_rates_come_from_the_last_row_that_has_both_numbers() -> None:
    rows: list[Section] = [
        {"step": 10, "wall_s": 4.0, "tokens": 800},
        {"step": 20, "wall_s": 8.0},
        {"step": 30, "wall_s": None},
    ]
    metrics = Metrics(tuple(rows))
    assert (metrics.per_second("step"), metrics.per_second("tokens"), metrics.per_second("samples")) == (
        2.5,
        200.0,
        None,
    )
    assert Metrics(({"step": 0, "wall_s": 0.0},)).per_second("step") is None


def test_every_file_of_a_hundred_runs_is_opened_once(tmp_path: Path) -> None:
    rows = [json.dumps(row) for row in metric_rows(num_steps=150)]
    for seed in range(100):
        folder = write_run(tmp_path, seed=seed, rows=[])
        (folder / "metrics.jsonl").write_text("\n".join(rows) + "\n")
    code = (
        "import sys, collections, pathlib\n"
        "opened = collections.Counter()\n"
        "sys.addaudithook(lambda event, args: event == 'open' and opened.update([str(args[0])]))\n"
        "from grpo_exp.report.load import find_runs\n"
        "from grpo_exp.report.tables import summarise\n"
        "summary = summarise(find_runs([pathlib.Path(sys.argv[1])]))\n"
        "inside = {name: n for name, n in opened.items() if name.startswith(sys.argv[1])}\n"
        "print(len(summary.runs), len(inside), max(inside.values()))\n"
        "print(*sorted({'torch', 'numpy', 'scipy', 'pandas', 'hydra', 'omegaconf'} & sys.modules.keys()))\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True, timeout=15
    )
    assert result.stdout == "100 400 1\n\n"


def test_flattening_keeps_lists_and_empty_mappings_as_leaves() -> None:
    assert flatten({"a": {"b": 1, "c": {}}, "d": [1, {"e": 2}]}) == {"a.b": 1, "a.c": {}, "d": [1, {"e": 2}]}
