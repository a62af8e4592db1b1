"""The model that ships with the package: small, loadable without a network, and poor at its tasks."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from grpo_exp import assets, tasks
from grpo_exp.config.schema import TaskConfig, TaskName

TINY = assets.path("tiny")
SCRIPT = Path(__file__).parents[1] / "scripts" / "build_tiny_model.py"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(TINY)


def accuracy(folder: Path, name: TaskName, sample: bool) -> float:
    """Share of 256 held-out prompts answered rightly, at temperature 1 or greedily."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    task = tasks.build(TaskConfig(name=name))
    ids = torch.tensor([tokenizer.encode(row["prompt"]) for row in task.eval])
    torch.manual_seed(0)
    answers = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=sample, max_new_tokens=8, **all_tokens(sample)
    )
    completions = tokenizer.batch_decode(answers[:, ids.shape[1] :], skip_special_tokens=True)
    assert task.accuracy is not None
    right = task.accuracy(completions=completions, answer=[row["answer"] for row in task.eval])
    return sum(right) / len(right)


def all_tokens(sample: bool) -> dict[str, int]:
    """Without this, transformers samples from the 50 likeliest tokens."""
    return {"top_k": 0} if sample else {}


def build_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("build_tiny_model", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_checkpoint_is_small_and_in_fp32():
    assert sum(file.stat().st_size for file in TINY.iterdir()) < 1_000_000
    model = AutoModelForCausalLM.from_pretrained(TINY)
    assert model.dtype is torch.float32
    assert sum(parameter.numel() for parameter in model.parameters()) == 127_424
    assert json.loads((TINY / "config.json").read_text())["dtype"] == "float32"
    config = AutoConfig.from_pretrained(TINY)
    assert (config.model_type, config.vocab_size, config.tie_word_embeddings) == ("qwen3", 64, True)


def test_a_name_that_does_not_ship_is_an_error():
    with pytest.raises(FileNotFoundError, match="'huge'"):
        assets.path("huge")


def test_every_prompt_starts_with_bos_and_has_one_token_per_character(tokenizer: Any):
    ids = tokenizer.encode("fadchb>")
    assert ids[0] == tokenizer.bos_token_id
    assert len(ids) == 8
    assert tokenizer.convert_ids_to_tokens(ids[1:]) == list("fadchb>")
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id, len(tokenizer)) == (0, 1, 2, 64)


def test_decoding_gives_the_characters_back_with_nothing_between_them(tokenizer: Any):
    text = "abc xyz, 019? (3+4)*2 = 14;\nit's <b>!"
    assert tokenizer.decode([*tokenizer.encode(text), 2, 0, 0], skip_special_tokens=True) == text
    assert tokenizer.encode("É", add_special_tokens=False) == [tokenizer.unk_token_id]


def test_the_whole_vocabulary_is_used_and_every_id_can_be_decoded(tokenizer: Any):
    characters = [tokenizer.decode([index]) for index in range(64)]
    assert len(set(characters)) == 64
    assert all(len(character) == 1 for character in characters[4:])


def test_a_batch_is_padded_on_the_left(tokenizer: Any):
    batch = tokenizer(["ab>", "abcd>"], padding=True)
    assert batch["input_ids"][0][:2] == [0, 0]
    assert batch["attention_mask"][0] == [0, 0, 1, 1, 1, 1]


@pytest.mark.parametrize(("name", "low", "high"), [(TaskName.reverse, 0.03, 0.15), (TaskName.sort, 0.05, 0.25)])
def test_the_model_is_right_now_and_then_but_not_often(name: TaskName, low: float, high: float):
    assert low < accuracy(TINY, name, sample=True) < high


def test_the_greedy_model_leaves_room_as_well():
    assert accuracy(TINY, TaskName.reverse, sample=False) < 0.65


@pytest.mark.slow
def test_the_script_reproduces_the_shipped_model(tmp_path: Path):
    """Weights differ in the last bits between processors, so it is compared what they do."""
    script = build_script()
    tokenizer = script.tokenizer()
    script.save(script.train(tokenizer), tokenizer, tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {file.name for file in TINY.iterdir()}
    assert (tmp_path / "tokenizer.json").read_bytes() == (TINY / "tokenizer.json").read_bytes()
    for name in (TaskName.reverse, TaskName.sort):
        assert accuracy(tmp_path, name, True) == pytest.approx(accuracy(TINY, name, True), abs=0.08)
