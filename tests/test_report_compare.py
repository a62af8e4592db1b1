"""What ``grpo-exp compare`` prints. After a wanted change of the output: UPDATE_GOLDEN=1 pytest, then read the diff."""

import csv
import io
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from rich.console import Console
from run_folders import write_run, write_sweep, write_troubled_sweep

from grpo_exp.report.compare import main, render

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Relative paths keep the golden files free of what differs from one machine to the next."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)


def golden(name: str, text: str) -> None:
    text = "\n".join(line.rstrip() for line in text.splitlines()) + "\n"
    if os.environ.get("UPDATE_GOLDEN"):
        (GOLDEN / name).write_text(text, encoding="utf-8")
    assert text == (GOLDEN / name).read_text(encoding="utf-8")


def printed(root: Path, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    render([root], console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("kind", ["clean", "troubled"])
def test_the_printed_comparison_is_the_golden_one(kind: str) -> None:
    """A8"""
    (write_sweep if kind == "clean" else write_troubled_sweep)(Path("runs"))
    text = printed(Path("runs"))
    golden(f"compare_{kind}.txt", text)
    assert max(len(line) for line in text.splitlines() if "─" in line) <= 100
    assert "\x1b" not in text


@pytest.mark.parametrize("kind", ["clean", "troubled"])
def test_the_markdown_comparison_is_the_golden_one(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    (write_sweep if kind == "clean" else write_troubled_sweep)(Path("runs"))
    assert main(["runs", "--md"]) == 0
    golden(f"compare_{kind}.md", capsys.readouterr().out)


def test_missing_metrics_are_shown_as_a_dash(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path, rows=[])
    assert main([str(tmp_path), "--md"]) == 0
    assert "| precision=bf16 | 1 / 1 | – | – | – |" in capsys.readouterr().out


def test_a_single_run_has_values_without_an_interval(tmp_path: Path) -> None:
    folder = write_run(tmp_path)
    _, values = printed(folder).split("At the end of training")
    assert "0.200 → 0.850" in values
    assert "±" not in values
    assert "minus the baseline" not in values
    assert "one arm only: nothing to compare it with" in values


def test_one_seed_per_arm_gives_a_difference_without_an_interval(tmp_path: Path) -> None:
    write_sweep(tmp_path, ["bf16", "fp32"], [0])
    verdict, line = [line for line in printed(tmp_path).splitlines() if "too few for an interval" in line]
    assert "(1 paired seed)" in verdict
    assert line.split()[:4] == ["precision=bf16", "-0.010", "–", "1"]


@pytest.mark.parametrize("state", ["failed", "created"])
def test_a_sweep_without_a_done_run_is_listed_whole(tmp_path: Path, state: str) -> None:
    for precision in ("bf16", "fp32"):
        write_run(tmp_path, precision=precision, state=state, reason="it failed", rows=[])
    text = printed(tmp_path)
    assert "nothing to compare" in text
    assert text.split("Stability")[0].count("0 / 1") == 2
    assert text.count("it failed") == 2


def test_only_broken_folders_are_listed_with_the_reason(tmp_path: Path) -> None:
    (write_run(tmp_path) / "status.json").unlink()
    text = printed(tmp_path)
    assert "1 run: 1 broken" in text
    assert "status.json is missing" in text


NASTY = "a|b<img src=x>`*c*`[d](e)&amp;_f_\\~g\n# h"


def test_names_are_escaped_in_markdown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    factors = {"x": NASTY}
    write_run(tmp_path, "one", factors=factors, config={"x": NASTY}, manifest={"run.name": NASTY})
    write_run(
        tmp_path, "two", factors={"x": "- 1"}, config={"x": "# 2"}, state="failed", reason="# heading <b>bold</b>"
    )
    assert main([str(tmp_path), "--md"]) == 0
    tokens = MarkdownIt("commonmark").enable("table").parse(capsys.readouterr().out)
    inline = [token for token in tokens if token.type == "inline"]
    kinds = {child.type for token in inline for child in token.children or []}
    assert kinds <= {"text", "text_special", "softbreak"}
    assert {token.type for token in tokens}.isdisjoint({"html_block", "code_block", "fence"})
    headings = [token for token in tokens if token.type == "heading_open"]
    assert {token.tag for token in headings} == {"h2", "h3"}
    shown = ["".join(child.content for child in token.children or []) for token in inline]
    assert f"x={NASTY}".replace("\n", "\N{REPLACEMENT CHARACTER}") in shown
    assert "# heading <b>bold</b>" in shown


def test_names_are_text_and_not_markup_on_a_terminal(tmp_path: Path) -> None:
    name = "[red]x[/red] \x1b[31m\x07"
    write_run(tmp_path, "one", factors={"x": name}, config={"x": name}, manifest={"run.name": name}, state="failed")
    text = printed(tmp_path)
    assert "[red]x[/red] \N{REPLACEMENT CHARACTER}[31m" in text
    assert "\x1b" not in text


@pytest.mark.parametrize("width", [50, 60, 80])
def test_nothing_is_cut_off_on_a_narrow_terminal(tmp_path: Path, width: int) -> None:
    write_sweep(tmp_path)
    narrow, wide = (Counter(filter(str.isalnum, printed(tmp_path, columns))) for columns in (width, 200))
    assert narrow == wide


def test_json_is_strict_and_has_the_raw_values_of_each_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_troubled_sweep(tmp_path)
    assert main([str(tmp_path), "--json"]) == 0

    def refuse(literal: str) -> None:
        raise AssertionError(literal)

    content = json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert len(content["runs"]) == 16
    values = {run["name"]: run["values"] for run in content["runs"]}
    assert values["precision=bf16-seed=1"]["eval/accuracy"] == 0.86
    assert values["precision=fp16-seed=6"]["eval/accuracy"] is None
    assert content["arms"][2]["num_done"] == 3
    assert content["arms"][0]["estimates"]["eval/accuracy"]["n"] == 4
    assert content["confounded"] is True
    assert [item["key"] for item in content["confounds"]] == ["trainer.eval_every", "versions.torch"]
    assert content["differences"][0]["kind"] == "paired"


def test_csv_has_one_row_per_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_troubled_sweep(tmp_path)
    assert main([str(tmp_path), "--csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert len(rows) == 16
    by_name = {row["name"]: row for row in rows}
    first = by_name["precision=bf16-seed=1"]
    assert (first["precision"], first["seed"], first["compute"], first["eval/accuracy"]) == (
        "bf16",
        "1",
        "bf16",
        "0.86",
    )
    assert (by_name["torn"]["state"], by_name["torn"]["precision"]) == ("broken", "")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "error: PATH='': allowed: run folders, or --wandb ENTITY/PROJECT"),
        ([""], "error: argument PATH: an empty path"),
        (["nope"], "error: PATH='nope': no such folder"),
        (["empty"], "error: PATH='empty': no run in it"),
        (["runs", "nope"], "error: PATH='nope': no such folder"),
        (["runs", "--json", "--md"], "error: argument --md: not allowed with argument --json"),
        (["runs", "--baseline", "precision=int8"], "error: baseline='precision=int8': allowed: precision=bf16"),
        (["runs", "--metric", "eval/x"], "error: metric='eval/x': allowed: eval/"),
        (["runs", "--colour"], "error: unrecognized arguments: --colour"),
    ],
)
def test_a_wrong_argument_is_one_line_and_exit_code_two(
    arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("empty").mkdir()
    write_run(Path("runs"))
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(expected)
    assert (captured.err.count("\n"), captured.out) == (1, "")


def test_confounds_are_exit_code_three_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    write_sweep(Path("clean"))
    write_troubled_sweep(Path("troubled"))
    codes = [main([path, *flag]) for path in ("clean", "troubled") for flag in ([], ["--fail-if-confounded"])]
    assert codes == [0, 0, 0, 3]
    assert "2 differences between arms that precision does not explain" in capsys.readouterr().out


def test_help_says_what_the_command_does(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert capsys.readouterr().out.startswith("usage: grpo-exp compare")


def test_output_into_a_pipe_is_plain_and_a_hundred_columns_wide() -> None:
    write_sweep(Path("runs"))
    code = "import sys; from grpo_exp.report.compare import main; sys.exit(main(['runs']))"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert result.stdout == printed(Path("runs"))
    assert "precision=bf16         2 / 2" in result.stdout


def test_the_command_imports_neither_torch_nor_hydra() -> None:
    code = (
        "import sys, grpo_exp.report.compare\n"
        "print(*{'torch', 'numpy', 'scipy', 'pandas', 'hydra', 'omegaconf'} & sys.modules.keys())"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert result.stdout.strip() == ""


def test_a_reader_that_stops_early_and_an_old_locale_are_no_errors() -> None:
    for seed in range(60):
        write_run(Path("runs"), seed=seed, state="failed", rows=[], reason="long " * 50)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-c", "import sys; from grpo_exp.report.compare import main; main(sys.argv[1:])", "runs"]
    for flags in ([], ["--json"]):
        with subprocess.Popen(
            [*command, *flags], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
        ) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            assert process.stdout.read(20)
            process.stdout.close()
            assert process.stderr.read() == b""
