"""Tasks: their prompts, their judges, and what is said about data that cannot be used."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from grpo_exp import tasks
from grpo_exp.config.schema import TaskConfig, TaskName
from grpo_exp.errors import ConfigError
from grpo_exp.tasks import reverse, shortest, sort
from grpo_exp.tasks.types import text

GENERATED = [TaskName.reverse, TaskName.sort, TaskName.shortest]


def prompts(rows: list[dict[str, Any]]) -> list[str]:
    return [row["prompt"] for row in rows]


def jsonl(folder: Path, rows: list[Any], **settings: Any) -> TaskConfig:
    """A configuration for a file with these rows; a string is written as it is."""
    path = folder / "data.jsonl"
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return TaskConfig(**{"name": TaskName.jsonl, "path": str(path), "reward": "letter_rewards:num_letters", **settings})


def numbered(count: int) -> list[dict[str, str]]:
    return [{"prompt": f"p{index}", "answer": f"a{index}"} for index in range(count)]


@pytest.mark.parametrize("name", GENERATED)
def test_no_prompt_occurs_twice_also_not_in_both_parts(name: TaskName):
    task = tasks.build(TaskConfig(name=name, num_train=3000, num_eval=500))
    assert (len(task.train), len(task.eval)) == (3000, 500)
    assert len({*prompts(task.train), *prompts(task.eval)}) == 3500


@pytest.mark.parametrize("name", GENERATED)
def test_the_seed_alone_fixes_the_prompts(name: TaskName):
    first, again, other = (tasks.build(TaskConfig(name=name, seed=seed)) for seed in (0, 0, 1))
    assert first.train == again.train
    assert first.eval == again.eval
    assert not set(prompts(first.eval)) & set(prompts(other.eval))


def test_the_prompts_of_seed_zero_are_these_on_every_machine():
    reversing, sorting = (tasks.build(TaskConfig(name=name)) for name in (TaskName.reverse, TaskName.sort))
    assert reversing.train[:2] == [{"prompt": "ijjied>", "answer": "deijji"}, {"prompt": "ebdiba>", "answer": "abidbe"}]
    assert sorting.train[0] == {"prompt": "434400:", "answer": "003444"}


def test_more_training_prompts_leave_the_evaluation_as_it_was():
    few, many = (tasks.build(TaskConfig(num_train=number)) for number in (10, 1000))
    assert few.eval == many.eval
    assert few.train == many.train[:10]


def test_answers_are_the_letters_backwards_and_the_digits_in_order():
    assert reverse.row("fadchb") == {"prompt": "fadchb>", "answer": "bhcdaf"}
    assert sort.row("503917") == {"prompt": "503917:", "answer": "013579"}
    task = tasks.build(TaskConfig(length=9, num_train=5))
    assert all(len(row["prompt"]) == 10 and row["answer"] == row["prompt"][8::-1] for row in task.train)


def test_half_of_the_reward_is_for_the_whole_answer_and_half_for_right_positions():
    given = ["bhcdaf", "bhcdax", "bhcdafb", "", "xxxxxx", "bhc"]
    rewards = reverse.reward(given, ["bhcdaf"] * 6)
    assert rewards == pytest.approx([1.0, 5 / 12, 0.5, 0.0, 0.0, 0.25])
    assert reverse.accuracy(given, ["bhcdaf"] * 6) == [True, False, False, False, False, False]


def test_the_shortest_completion_gets_the_highest_reward():
    assert shortest.reward(completion_ids=[[2], [5, 6, 2]], prompts=["a", "a"], completions=["", "ab"]) == [-1.0, -3.0]
    task = tasks.build(TaskConfig(name=TaskName.shortest))
    assert task.accuracy is None
    assert set(task.train[0]) == {"prompt"}


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"length": 0}, "task.length"),
        ({"length": 65}, "task.length"),
        ({"length": 3}, "task.num_train"),  # 1000 strings, too few for 8192 prompts
        ({"num_train": 0}, "task.num_train"),
        ({"num_eval": -1}, "task.num_eval"),
        ({"max_completion_tokens": 0}, "task.max_completion_tokens"),
        ({"reward_timeout_s": 0.0}, "task.reward_timeout_s"),
        ({"reward_timeout_s": float("nan")}, "task.reward_timeout_s"),
        ({"path": "data.jsonl"}, "task.path"),
        ({"reward": "module:function"}, "task.reward"),
    ],
)
@pytest.mark.parametrize("name", GENERATED)
def test_impossible_settings_are_named(name: TaskName, settings: dict[str, Any], key: str):
    config = TaskConfig(name=name, **settings)
    assert [error.key for error in tasks.validate(config)] == [key]
    with pytest.raises(ConfigError, match=key):
        tasks.build(config)


def test_all_problems_are_found_at_once():
    config = TaskConfig(name=TaskName.jsonl, num_eval=-1, reward_timeout_s=-1)
    keys = [error.key for error in tasks.validate(config)]
    assert keys == ["task.num_eval", "task.reward_timeout_s", "task.path", "task.reward"]
    with pytest.raises(ConfigError, match=r"(?s)task\.num_eval.*task\.path"):
        tasks.build(config)


def test_a_file_is_read_row_by_row_with_all_its_columns(tmp_path: Path):
    rows = [{"question": "1+1", "answer": 2, "level": "easy"}, "", {"question": "é", "answer": "", "level": None}]
    task = tasks.build(jsonl(tmp_path, rows, prompt_field="question"))
    assert task.train == [
        {"prompt": "1+1", "answer": 2, "level": "easy"},
        {"prompt": "é", "answer": "", "level": None},
    ]
    assert task.reward_funcs == ["letter_rewards:num_letters"]


def test_a_completion_is_right_if_it_is_the_answer_but_for_white_space(tmp_path: Path):
    task = tasks.build(jsonl(tmp_path, [{"prompt": "1+1", "result": 2}], answer_field="result"))
    assert task.accuracy is not None
    chat = [{"role": "assistant", "content": "2"}]
    given = [" 2\n", "22", chat]
    assert task.accuracy(completions=given, prompts=["1+1"] * 3, result=[2, 2, "2"]) == [True, False, True]


def test_without_answers_there_is_no_accuracy(tmp_path: Path):
    assert tasks.build(jsonl(tmp_path, [{"prompt": "x"}])).accuracy is None


def test_a_prompt_may_be_chat_messages(tmp_path: Path):
    messages = [{"role": "system", "content": "be short"}, {"role": "user", "content": "hello"}]
    assert tasks.build(jsonl(tmp_path, [{"prompt": messages}])).train == [{"prompt": messages}]
    assert text([{"role": "assistant", "content": "a"}, {"role": "tool", "content": None}]) == "a"


@pytest.mark.parametrize(
    ("count", "num_eval", "num_train"), [(1, 256, 1), (9, 5, 9), (10, 5, 5), (11, 5, 6), (10, 0, 10)]
)
def test_the_last_rows_are_held_out_if_as_many_remain_for_training(
    tmp_path: Path, count: int, num_eval: int, num_train: int
):
    rows = numbered(count)
    task = tasks.build(jsonl(tmp_path, rows, num_eval=num_eval))
    assert task.train == rows[:num_train]
    assert task.eval == rows[num_train:]


def test_an_evaluation_file_leaves_the_training_file_whole(tmp_path: Path):
    held_out = tmp_path / "eval.jsonl"
    held_out.write_text("".join(f'{{"prompt": "e{index}", "answer": ""}}\n' for index in range(4)))
    task = tasks.build(jsonl(tmp_path, numbered(10), num_eval=3, eval_path=str(held_out)))
    assert len(task.train) == 10
    assert prompts(task.eval) == ["e0", "e1", "e2"]


@pytest.mark.parametrize(
    ("rows", "key", "says"),
    [
        ([], "task.path", "the file is empty"),
        (["", "  "], "task.path", "only blank lines"),
        ([{"prompt": "x"}, "", "{'prompt': 'y'}"], "task.path", "line 3.*not JSON"),
        ([{"prompt": "x"}, "[1]"], "task.path", "line 2.*this is a list"),
        ([{"prompt": "x"}, {"question": "y"}], "task.prompt_field", "line 2: this row has question"),
        ([{"prompt": ""}], "task.path", "line 1.*non-empty string"),
        ([{"prompt": 7}], "task.path", "line 1.*non-empty string"),
        ([{"prompt": [{"content": "no role"}]}], "task.path", "line 1.*chat messages"),
        ([{"prompt": "x", "answer": "1"}, {"prompt": "y"}], "task.answer_field", "row 2 of .* 1 of 2 rows"),
    ],
)
def test_bad_data_is_named_with_its_line(tmp_path: Path, rows: list[Any], key: str, says: str):
    with pytest.raises(ConfigError, match=says) as caught:
        tasks.build(jsonl(tmp_path, rows))
    assert caught.value.key == key
    assert "\n" not in str(caught.value)


def test_an_answer_field_that_is_asked_for_must_be_there(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"task\.answer_field='result'"):
        tasks.build(jsonl(tmp_path, numbered(3), answer_field="result"))


def test_missing_files_are_named(tmp_path: Path):
    config = jsonl(tmp_path, numbered(3), path=str(tmp_path / "no.jsonl"), eval_path=str(tmp_path))
    path, eval_path = tasks.validate(config)
    assert (path.key, eval_path.key) == ("task.path", "task.eval_path")
    assert "there is no such file" in path.fix
    assert "that is a folder" in eval_path.fix


@pytest.mark.parametrize(
    "reward", ["", "module", "module:", ":function", "a-b:f", "module:f()", "no/such.py:f", "a/b:f"]
)
def test_a_misspelt_reward_is_found_without_importing_it(tmp_path: Path, reward: str):
    assert [error.key for error in tasks.validate(jsonl(tmp_path, numbered(3), reward=reward))] == ["task.reward"]


@pytest.mark.parametrize(
    "reward", ["letter_rewards:num_letters", "grpo_exp.tasks.jsonl:ExactMatch.__call__", "{}/rewards.py:f"]
)
def test_rewards_may_be_in_modules_and_in_files(tmp_path: Path, reward: str):
    (tmp_path / "rewards.py").write_text("f = print\n")
    assert tasks.validate(jsonl(tmp_path, numbered(3), reward=reward.format(tmp_path))) == []


def test_tasks_import_no_torch():
    code = (
        "import sys; from grpo_exp import tasks; from grpo_exp.config.schema import TaskConfig; import grpo_exp.assets;"
        "import grpo_exp.tasks.rewards; tasks.build(TaskConfig()); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_file_that_is_no_text_is_named(tmp_path: Path):
    path = tmp_path / "binary.jsonl"
    path.write_bytes(b'{"prompt": "\xff"}\n')
    with pytest.raises(ConfigError, match=r"task\.path=.*UTF-8"):
        tasks.build(TaskConfig(name=TaskName.jsonl, path=str(path), reward="letter_rewards:num_letters"))
