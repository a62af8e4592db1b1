"""What the schema promises, and the words in which its errors are put."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any, get_args, get_type_hints

import pytest
from hydra.errors import HydraException
from hypothesis import given
from hypothesis import strategies as st

from grpo_exp.config import schema
from grpo_exp.config.compose import normalise, varied_keys
from grpo_exp.config.messages import allowed, did_you_mean_option, explain, explain_value, leaves, no_such_key
from grpo_exp.config.schema import Config, default_config

ENUMS = [
    kind for kind in vars(schema).values() if isinstance(kind, type) and issubclass(kind, Enum) and kind is not Enum
]


def groups(owner: Any = Config) -> Iterator[type]:
    yield owner
    for hint in get_type_hints(owner).values():
        if is_dataclass(hint):
            yield from groups(hint)


@pytest.mark.parametrize("kind", ENUMS)
def test_a_choice_is_spelled_by_its_name_which_is_its_value(kind: type[Enum]) -> None:
    """Hydra matches names, users read values."""
    assert all(member.name == member.value for member in kind)


def test_every_group_is_a_dataclass_that_hydra_can_override() -> None:
    """Not frozen, documented types only: what may be one of several names is an enum, not a Literal or a bare string."""
    for group in groups():
        assert not group.__dataclass_params__.frozen, group  # type: ignore[attr-defined]
    for key, hint in leaves().items():
        parts = [part for part in get_args(hint) if part is not type(None)] or [hint]
        assert all(part in (int, float, bool, str, Any) or isinstance(part, type) for part in parts), key


def test_every_setting_has_a_default_but_the_model() -> None:
    config = default_config()
    missing = [
        f"{group}.{entry.name}"
        for group in (one.name for one in fields(config))
        if is_dataclass(part := getattr(config, group))
        for entry in fields(part)
        if getattr(part, entry.name) == "???"
    ]
    assert missing == ["model.name_or_path"]


def test_what_a_setting_may_be_can_be_said_of_every_one() -> None:
    for key in leaves():
        assert allowed(key), key
    assert allowed("trainer.max_steps") == "a whole number, null"
    assert allowed("algo.advantage") == "grpo, dr_grpo, rloo"
    assert allowed("trainer.device") == "auto, cpu, cuda"
    assert allowed("model.trust_remote_code") == "true, false"
    assert allowed("tracker.tags") == "a list [a,b]"
    assert allowed("nothing.of_the_kind") == ""


@given(st.data())
def test_a_slip_in_a_key_is_answered_with_that_key(data: st.DataObject) -> None:
    """One letter left out, doubled or swapped."""
    key = data.draw(st.sampled_from([name for name in leaves() if len(name.rpartition(".")[2]) >= 6]))
    start = key.rfind(".") + 1
    at = data.draw(st.integers(start, len(key) - 2))
    slip = data.draw(
        st.sampled_from(
            [key[:at] + key[at + 1 :], key[:at] + key[at] + key[at:], key[:at] + key[at + 1] + key[at] + key[at + 2 :]]
        )
    )
    if slip not in leaves():
        assert no_such_key(slip) == f"no such key; did you mean {key}?"


@pytest.mark.parametrize(
    ("key", "answer"),
    [
        ("max_steps", "trainer.max_steps"),
        ("lr", "optim.lr"),
        ("trainer.group_size", "algo.group_size"),
        ("trainr.max_steps", "trainer.max_steps"),
        ("precisoin", "precision"),
        ("wholly.different", ""),
    ],
)
def test_a_key_in_the_wrong_place_is_answered_with_the_right_one(key: str, answer: str) -> None:
    assert no_such_key(key) == (f"no such key; did you mean {answer}?" if answer else "no such key")


def test_a_number_format_is_not_taken_for_another() -> None:
    """A suggestion would be followed without a second look."""
    options = ["auto", "bf16", "fp16", "fp32"]
    assert did_you_mean_option("bfloat", options) == "did you mean bf16?"
    assert did_you_mean_option("b16", options) == "did you mean bf16?"
    for other in ("float8_e4m3fn", "int8", "complex64", "tensor", "cuda", "nn", ""):
        assert did_you_mean_option(other, options) == ""


def test_an_error_that_is_not_known_keeps_its_own_words() -> None:
    assert str(explain(HydraException("something\n  quite   new See https://hydra.cc"), [])) == "something quite new"
    assert str(explain_value(ValueError("something else"), ["seed=1"])) == "something else"


def test_flags_may_stand_anywhere_among_overrides() -> None:
    line = ["debug=smoke", "--config-dir", "mine", "seed=0,1", "-m", "precision=BF16,Half"]
    assert normalise(line) == ["--config-dir", "mine", "-m", "debug=smoke", "seed=0,1", "precision=bf16,fp16"]
    assert normalise(["-sc", "query=bash"]) == ["-sc", "query=bash"]
    assert normalise(["~tracker", "--cfg", "job"]) == ["--cfg", "job", "~tracker"]


def test_what_varies_in_a_sweep_are_its_factors() -> None:
    """F12: values without the quotes of Hydra's grammar, numbers as they were written."""
    jobs = [["seed=0", "precision=bf16", "optim.lr=1e-5"], ["seed=1", "precision=bf16", "optim.lr=1e-5"]]
    assert varied_keys(jobs) == [{"seed": "0"}, {"seed": "1"}]
    jobs = [["optim.lr=1e-5", r"task.reward=a.py\:f"], ["optim.lr=0.0001", "task.reward='a.py:g'"]]
    assert varied_keys(jobs) == [
        {"optim.lr": "1e-05", "task.reward": "a.py:f"},
        {"optim.lr": "0.0001", "task.reward": "a.py:g"},
    ]
    assert varied_keys([["++model.init_kwargs.dtype=bf16"], ["++model.init_kwargs.dtype=fp16"]]) == [
        {"model.init_kwargs.dtype": "bf16"},
        {"model.init_kwargs.dtype": "fp16"},
    ]
    assert varied_keys([["seed=0"]]) == [{}]
    assert varied_keys([]) == []
