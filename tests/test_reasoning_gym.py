"""``task=reasoning_gym``: which questions are drawn, what of a completion is scored, and what is refused beforehand."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from commands import command

from grpo_exp import tasks
from grpo_exp.config.compose import compose, to_typed
from grpo_exp.config.schema import AnswerFrom, TaskConfig, TaskName
from grpo_exp.tasks import gym
from grpo_exp.tasks.rewards import RewardRunner

pytest.importorskip("reasoning_gym", reason="the package reasoning-gym (extra reasoning-gym) is not installed")

SUMS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


def config(**settings: Any) -> TaskConfig:
    defaults = {"dataset": "chain_sum", "dataset_kwargs": SUMS, "num_train": 64, "num_eval": 16}
    return TaskConfig(**{"name": TaskName.reasoning_gym, **defaults, **settings})


def problems(*overrides: str) -> list[str]:
    return [str(error) for error in tasks.validate(to_typed(compose(list(overrides)).config).task)]


def questions(rows: list[dict[str, Any]]) -> list[str]:
    return [row["prompt"][-1]["content"] for row in rows]


@pytest.mark.parametrize("dataset", ["chain_sum", "spell_backward", "countdown", "graph_color"])
def test_no_question_is_both_trained_and_evaluated_on(dataset: str) -> None:
    kwargs = SUMS if dataset == "chain_sum" else {}
    task = tasks.build(config(dataset=dataset, dataset_kwargs=kwargs))
    train, held_out = questions(task.train), questions(task.eval)
    assert (len(train), len(held_out)) == (64, 16)
    assert len(set(held_out)) == 16
    assert not set(train) & set(held_out)
    assert (task.accuracy is None) == (dataset == "graph_color")  # whose answers are not unique


def test_the_questions_depend_on_the_seed_alone_and_held_out_ones_not_on_how_many_are_trained() -> None:
    one, again, other = (tasks.build(config(seed=seed)) for seed in (0, 0, 1))
    assert one.train == again.train
    assert questions(one.train) != questions(other.train)
    assert set(questions(one.eval)) != set(questions(other.eval))
    assert tasks.build(config(num_train=8)).eval == one.eval


def test_neighbouring_seeds_do_not_share_their_items_shifted_by_one() -> None:
    wide = {"dataset_kwargs": {"min_terms": 6, "min_digits": 4}}
    one, other = (set(questions(tasks.build(config(seed=seed, **wide)).train)) for seed in (0, 1))
    assert not one & other


@pytest.mark.parametrize(
    ("written", "answer_from", "found"),
    [
        ("The answer is 12.", AnswerFrom.number, "12"),
        ("12 - 5 = -7", AnswerFrom.number, "-7"),
        ("12-5", AnswerFrom.number, "5"),
        ("1,024.5 apples", AnswerFrom.number, "1,024.5"),
        ("seven", AnswerFrom.number, None),
        ("<answer>a</answer> or <answer> b\n</answer>", AnswerFrom.tag, "b"),
        ("a", AnswerFrom.tag, None),
        (" a b ", AnswerFrom.text, "a b"),
    ],
)
def test_the_answer_is_found_where_it_is_looked_for(written: str, answer_from: AnswerFrom, found: str | None) -> None:
    assert gym.find_answer([{"role": "assistant", "content": written}], answer_from) == found


def test_rewards_are_those_of_the_datasets_own_scorer_in_the_reward_process() -> None:
    task = tasks.build(config(answer_from=AnswerFrom.number))
    row = task.train[0]
    written = [f"It is {row['answer']}.", f"{row['answer']}.00", "no idea", "999"]
    completions = [[{"role": "assistant", "content": text}] for text in written]
    with RewardRunner(task.reward_funcs) as runner:
        runner.submit(0, row, completions, [[1]] * 4)
        assert len(runner.connections()) == 1  # a process that can be ended: scorers parse what a model wrote
        results: list[Any] = []
        while not results:
            results = runner.poll()
    assert results[0].error is None
    assert results[0].rewards[:3] == [1.0, 1.0, 0.0]
    assert 0 <= results[0].rewards[3] < 0.1
    assert task.accuracy is not None
    assert task.accuracy(completions=completions, answer=[row["answer"]] * 4) == [True, False, False, False]


def test_system_prompts_are_texts_or_names_of_the_packages_own() -> None:
    plain, named, own = (tasks.build(config(system_prompt=text)).train[0] for text in (None, "default", "Be brief."))
    assert [message["role"] for message in plain["prompt"]] == ["user"]
    assert "<answer>" in named["prompt"][0]["content"]
    assert own["prompt"][0] == {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["task=reasoning_gym"], "task.dataset=null"),
        (["task=reasoning_gym", "task.dataset=chain_sums"], "did you mean chain_sum?"),
        (["task=chain_sum", "task.dataset_kwargs.min_term=1"], "did you mean min_terms?"),
        (["task=chain_sum", "task.dataset_kwargs.seed=1"], "task.seed, task.num_train and task.num_eval set it"),
        (["task=chain_sum", "task.dataset_kwargs.min_terms=3"], "max_terms must be >= min_terms"),
        (["task=chain_sum", "task.dataset_kwargs={max_digits: two}"], "chain_sum refuses that"),
        (["task=chain_sum", "task.num_eval=500"], "chain_sum has too few questions"),
        (["task=chain_sum", "task.path=a.jsonl"], "null with task=reasoning_gym"),
        (["task=reverse", "task.dataset=chain_sum"], "null with task=reverse (add task=reasoning_gym)"),
        (["task=sort", "task.dataset_kwargs={a: 1}"], "null with task=sort"),
    ],
)
def test_what_cannot_be_is_refused_with_what_to_do(overrides: list[str], said: str) -> None:
    [problem] = problems(*overrides)
    assert said in problem


def test_any_dataset_and_its_parameters_can_be_named_on_the_command_line() -> None:
    overrides = ["task=reasoning_gym", "task.dataset=spell_backward", "task.dataset_kwargs={max_word_len: 4}"]
    assert problems(*overrides) == []
    task = tasks.build(to_typed(compose([*overrides, "task.num_train=8", "task.num_eval=4"]).config).task)
    assert all(len(row["answer"]) <= 4 for row in task.train)
    assert problems("task=chain_sum", "task.dataset_kwargs.max_digits=3") == []


def test_without_the_package_the_line_that_installs_it_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    [problem] = tasks.validate(config())
    assert "pip install 'grpo-exp[reasoning-gym]'" in str(problem)


def test_a_wrong_dataset_is_said_in_a_line_and_no_run_folder_is_made(tmp_path: Path) -> None:
    done = command("task=reasoning_gym", "task.dataset=chain_sums", cwd=tmp_path)
    assert done.code == 2
    assert len(done.err.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []
