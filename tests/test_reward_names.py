"""A reward function's name is checked by reading, not by importing: what is not there is known before anything is made."""

import subprocess
import sys
from pathlib import Path

import pytest
from commands import PROGRAM

from grpo_exp.tasks import import_path, static

SOURCE = '''
"""A module that must not be imported."""
import os as system
from math import sqrt, floor as lower

raise_at_import = 1 / 0


def reward(completions, **columns):
    hidden = 1
    return [hidden for _ in completions]


async def later(completions, **columns):
    return [0.0 for _ in completions]


class Judge:
    @staticmethod
    def judge(completions, **columns):
        return [0.0 for _ in completions]


judge = Judge()
made = print
scale, offset = 1.0, 2.0
number = 3
weights: dict[str, float] = {}
text = f"{number}"
if number:
    either = reward
else:
    def either(completions, **columns):
        return []
try:
    from json import dumps
except ImportError:
    dumps = None


def sets_a_global():
    global made_later
    made_later = reward
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder from which a command is given, with a module and a package."""
    (tmp_path / "mine.py").write_text(SOURCE)
    package = tmp_path / "pack" / "inner"
    package.mkdir(parents=True)
    (tmp_path / "pack" / "__init__.py").write_text("raise SystemExit('imported')\n")
    (package / "__init__.py").write_text("from .deep import one\n")
    (package / "deep.py").write_text("def one(completions, **columns): ...\n")
    (tmp_path / "broken.py").write_text("def reward(:\n")
    (tmp_path / "dynamic.py").write_text("globals()['reward'] = print\n")
    (tmp_path / "starred.py").write_text("from math import *\n")
    (tmp_path / "blanks and ünïcode.py").write_text("def reward(completions, **columns): ...\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "name",
    [
        *(f"mine:{name}" for name in ("reward", "later", "Judge", "Judge.judge", "judge", "judge.judge", "made")),
        *(f"mine:{name}" for name in ("system", "sqrt", "lower", "scale", "either", "made_later", "weights.get")),
        "mine.py:reward",
        "pack.inner.deep:one",
        "pack.inner:one",
        "pack.inner:deep.one",
        "pack:inner.one",
        "dynamic:anything",
        "starred:sqrt",
        "blanks and ünïcode.py:reward",
        "math:sqrt",
        "sys:exit",
        "json:dumps",
        "grpo_exp.tasks.reverse:reward",
    ],
)
@pytest.mark.usefixtures("folder")
def test_what_may_be_a_function_is_accepted_and_nothing_is_imported(name: str) -> None:
    before = set(sys.modules)
    assert import_path.problem(name) is None
    assert set(sys.modules) - before <= {"math", "json"}


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("mine:rewards", r"there is no rewards in .*mine\.py; did you mean reward\?"),
        ("mine:hidden", r"there is no hidden in .*mine\.py"),
        ("mine.py:nothing", r"there is no nothing in mine\.py"),
        ("mine:number", r"number in .*mine\.py is no function"),
        ("mine:weights", "weights in .* is no function"),
        ("mine:text", "text in .* is no function"),
        ("yours:reward", "there is no module yours among the installed ones or in /"),
        ("mine.inner:reward", r"there is no module mine\.inner"),
        ("pack.outer:one", r"there is no module pack\.outer"),
        ("pack:outer", "there is no outer in .*__init__"),
        ("pack.inner.deep:two", "there is no two in .*deep"),
        ("broken:reward", r"broken\.py, line 1: invalid syntax"),
        ("broken.py:reward", r"broken\.py, line 1: invalid syntax"),
        ("yours.py:reward", r"there is no file yours\.py in /"),
        ("grpo_exp.tasks.reverse:rewrad", "did you mean reward"),
    ],
)
@pytest.mark.usefixtures("folder")
def test_what_cannot_be_a_function_is_told_with_the_reason(name: str, problem: str) -> None:
    said = import_path.problem(name)
    assert said is not None
    assert problem in said or __import__("re").search(problem, said), said


def test_a_file_that_is_no_text_is_told(folder: Path) -> None:
    (folder / "bytes.py").write_bytes(b"\x00\xff\xfe")
    said = import_path.problem("bytes.py:reward")
    assert said is not None
    assert said.startswith("bytes.py")


def test_a_file_that_was_mended_is_read_again(folder: Path) -> None:
    assert import_path.problem("mine:mended") is not None
    (folder / "mine.py").write_text("def mended(completions, **columns): ...\n")
    assert import_path.problem("mine:mended") is None


def test_an_installed_module_wins_over_one_in_the_folder_of_the_command(folder: Path) -> None:
    (folder / "json.py").write_text("")
    spec = static.find("json")
    assert spec is not None
    assert Path(spec.origin or "").parent != folder


@pytest.mark.parametrize("sweep", [(), ("-m", "seed=0,1")])
def test_the_command_line_refuses_before_it_makes_anything(folder: Path, sweep: tuple[str, ...]) -> None:
    """E13: the reward's name and a bad row of the data, in one go, with exit code 2."""
    (folder / "prompts.jsonl").write_text('{"prompt": "ab>"}\n{"prompt": 3}\n')
    line = [PROGRAM, *sweep, "task=jsonl", "task.path=prompts.jsonl", "task.reward=mine:rewards"]
    done = subprocess.run(line, capture_output=True, text=True, cwd=folder)
    assert done.returncode == 2
    first, second = done.stderr.splitlines()
    assert first.startswith("error: task.path='prompts.jsonl, line 2'")
    assert second.startswith("error: task.reward='mine:rewards': ")
    assert not (folder / "runs").exists()
