"""The command line as a user meets it: what it says, how it exits, and that nothing heavy is loaded to say it.

After a wanted change of a message: UPDATE_GOLDEN=1 pytest tests/test_cli.py, then read the diff.
"""

import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from bad_commands import BAD, USER_FILES
from commands import PROGRAM

from grpo_exp import __version__
from grpo_exp.config.compose import CONF_DIR

GOLDEN = Path(__file__).parent / "golden" / "cli_errors.txt"

RUNNER = """
import contextlib, io, json, shlex, sys, time
from grpo_exp import checks, cli
checks.DRIVERS = ()  # whatever machine this is, it has no GPU
for line in json.load(sys.stdin):
    sys.argv = ["grpo-exp", *shlex.split(line)]
    out, start = io.StringIO(), time.process_time()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            cli.main()
        except SystemExit as end:
            code = end.code
    heavy = sorted(set(sys.modules) & {"torch", "transformers", "wandb", "accelerate"})
    print(json.dumps([line, out.getvalue(), code, time.process_time() - start, heavy]))
"""


def program(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([PROGRAM, *arguments], capture_output=True, text=True, cwd=cwd, env=os.environ | environment)


@pytest.fixture(scope="module")
def bad(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[tuple[str, str, int, float, list[str]]], Path]:
    """Every bad command line in one process, started in a folder of its own: what it says, its code, its seconds."""
    folder = tmp_path_factory.mktemp("bad")
    for name, text in USER_FILES.items():
        path = folder / "user" / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", RUNNER], input=json.dumps(BAD), capture_output=True, text=True, cwd=folder
    )
    assert done.returncode == 0, done.stderr
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()], folder


def test_every_bad_command_line_says_what_the_golden_file_says(
    bad: tuple[list[tuple[str, str, int, float, list[str]]], Path],
) -> None:
    """C1, E9, E12, E13: key, value, what is allowed and what to do, a line for each problem."""
    results, folder = bad
    text = "".join(f"$ grpo-exp {line}\n{said}" for line, said, *_ in results).replace(str(folder), "FOLDER")
    if os.environ.get("UPDATE_GOLDEN"):
        GOLDEN.write_text(text, encoding="utf-8")
    assert text == GOLDEN.read_text(encoding="utf-8")


def test_every_bad_command_line_exits_with_2_quickly_and_leaves_nothing(
    bad: tuple[list[tuple[str, str, int, float, list[str]]], Path],
) -> None:
    """E13, E9: no traceback, nothing heavy loaded, no run folder; in two seconds of its processor."""
    results, folder = bad
    assert len(results) == len(BAD)
    for line, said, code, seconds, heavy in results:
        assert (code, heavy) == (2, []), line
        assert said.startswith("error: "), line
        assert all(part.startswith("error: ") for part in said.splitlines()), line
        assert len(said.splitlines()) <= 8, line
        assert "Traceback" not in said, line
        assert seconds < 2, line
    assert {path.name for path in folder.iterdir()} == {"user"}


def test_the_program_itself_exits_with_2_and_prints_to_standard_error(tmp_path: Path) -> None:
    """E9."""
    done = program("precision=bf16,fp16,fp32", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: precision='bf16,fp16,fp32': allowed: one value (several values are a sweep: add -m)\n"
    assert list(tmp_path.iterdir()) == []


def test_a_list_is_one_value_also_in_a_sweep(tmp_path: Path) -> None:
    """E9: list options are not swept by mistake."""
    done = program("tracker.tags=[a,b]", "--cfg", "job", cwd=tmp_path)
    assert yaml.safe_load(done.stdout)["tracker"]["tags"] == ["a", "b"]


def test_printing_the_configuration_is_plain_yaml(tmp_path: Path) -> None:
    done = program("--cfg", "job", "precision=BFloat16", "seed=4", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    shown = yaml.safe_load(done.stdout)
    assert (shown["precision"]["compute"], shown["seed"], "hydra" in shown) == ("bf16", 4, False)


def test_every_launcher_and_the_hydra_part_resolve(tmp_path: Path) -> None:
    """E15."""
    for launcher in ("local", "basic"):
        done = program("--cfg", "hydra", "--resolve", f"hydra/launcher={launcher}", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert yaml.safe_load(done.stdout)["hydra"]["runtime"]["choices"]["hydra/launcher"] == launcher


def test_the_help_names_commands_groups_and_forms(tmp_path: Path) -> None:
    done = program("--help", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    for word in (
        "grpo-exp compare PATH",
        "grpo-exp resume RUN",
        "-m +sweeps=NAME",
        "precision: auto, bf16",
        "max_steps: 150",
    ):
        assert word in done.stdout
    assert "experiment: lockstep_fp32" in done.stdout


def test_the_version_is_ours(tmp_path: Path) -> None:
    assert program("--version", cwd=tmp_path).stdout == f"grpo-exp {__version__}\n"


LIGHT = """
import sys
from grpo_exp import cli
sys.argv = ["grpo-exp", *sys.argv[1:]]
try:
    cli.main()
except SystemExit as end:
    assert not end.code, end.code
print(*sorted({"torch", "transformers", "wandb", "accelerate"} & set(sys.modules)), file=sys.stderr)
"""


@pytest.mark.parametrize(
    "line", ["--help", "--cfg job tracker=wandb", "--info defaults", "compare RUNS", "compare --help"]
)
def test_what_only_shows_something_loads_nothing_heavy(line: str, tmp_path: Path) -> None:
    from run_folders import write_run

    write_run(tmp_path / "RUNS")
    arguments = [sys.executable, "-W", "error", "-c", LIGHT, *shlex.split(line)]
    done = subprocess.run(arguments, capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "\n")
    assert done.stdout


def test_a_closed_pipe_is_no_error(tmp_path: Path) -> None:
    command = f"set -o pipefail; {shlex.quote(PROGRAM)} --cfg job | head -1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=tmp_path)
    assert (done.stderr, done.stdout) == ("", "model:\n")


def test_tab_completion_works_as_in_any_hydra_application(tmp_path: Path) -> None:
    """The script that bash sources, and what it then asks for."""
    script = program("-sc", "install=bash", cwd=tmp_path).stdout
    assert "complete -o nospace -o default -F hydra_bash_completion" in script
    for typed, expected in {
        "precision=bf16": {
            "precision=bf16",
            "precision=bf16_head32",
            "precision=bf16_pure",
            "precision=bf16_rollout_fp32",
        },
        "trainer.max_": {
            "trainer.max_steps=",
            "trainer.max_epochs=",
            "trainer.max_minutes=",
            "trainer.max_skipped_steps=",
        },
        "experiment=so": {"experiment=sort"},
    }.items():
        line = f"grpo-exp {typed}"
        shown = program("-sc", "query=bash", cwd=tmp_path, COMP_LINE=line, COMP_POINT=str(len(line)))
        assert set(shown.stdout.split()) == expected


def test_completion_in_a_real_bash_offers_the_options(tmp_path: Path) -> None:
    """The installed script, sourced, then called as bash calls it."""
    folder = shlex.quote(str(Path(PROGRAM).parent))
    script = f"""
        export PATH={folder}:$PATH
        eval "$(grpo-exp -sc install=bash)"
        COMP_LINE="grpo-exp precision=fp16_" COMP_POINT=24 COMP_WORDS=(grpo-exp precision = fp16_) COMP_CWORD=3
        hydra_bash_completion
        echo "${{COMPREPLY[@]}}"
    """
    done = subprocess.run(["bash", "--norc", "-c", script], capture_output=True, text=True, cwd=tmp_path)
    assert "fp16_pure" in done.stdout, done.stderr


@pytest.mark.bench
def test_printing_the_configuration_costs_little_more_than_a_bare_hydra_application(tmp_path: Path) -> None:
    """At most 1.5 times; the best of several of each, in turns, so that a busy machine troubles both alike."""
    (tmp_path / "conf").mkdir()
    for path in CONF_DIR.rglob("*.yaml"):
        target = tmp_path / "conf" / path.relative_to(CONF_DIR)
        target.parent.mkdir(exist_ok=True)
        target.write_text(path.read_text())
    primary = tmp_path / "conf" / "config.yaml"
    ours = ("- schema", "hydra/launcher", "hydra/sweeper")
    primary.write_text(
        "".join(line for line in primary.read_text().splitlines(True) if not any(word in line for word in ours))
    )
    (tmp_path / "bare.py").write_text(
        "import hydra\n\n\n@hydra.main(version_base='1.3', config_path='conf', config_name='config')\n"
        "def main(config):\n    pass\n\n\nmain()\n"
    )
    commands = {"bare": [sys.executable, "bare.py", "--cfg", "job"], "ours": [PROGRAM, "--cfg", "job"]}
    best = dict.fromkeys(commands, float("inf"))
    for _ in range(5):
        for name, command in commands.items():
            start = time.perf_counter()
            subprocess.run(command, cwd=tmp_path, stdout=subprocess.DEVNULL, check=True)
            best[name] = min(best[name], time.perf_counter() - start)
    assert best["ours"] <= 1.5 * best["bare"], best
