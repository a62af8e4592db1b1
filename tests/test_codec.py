from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_exp.assets import locate
from grpo_exp.tokens import Codec, load_tokenizer

TOKENIZER = load_tokenizer(locate("asset:tiny"))
STRING, CHAT = {"prompt": "abc"}, {"prompt": [{"role": "user", "content": "abc"}]}


@given(st.lists(st.lists(st.integers(0, len(TOKENIZER) - 1), max_size=12), max_size=6))
def test_completions_are_decoded_as_the_tokenizer_does(token_ids: list[list[int]]) -> None:
    expected = [TOKENIZER.decode(ids, skip_special_tokens=True) for ids in token_ids]
    assert Codec(TOKENIZER).decode([STRING] * len(token_ids), token_ids) == expected


def test_a_completion_of_a_chat_is_a_message() -> None:
    ids = TOKENIZER("ab")["input_ids"]
    text = TOKENIZER.decode(ids, skip_special_tokens=True)
    assert Codec(TOKENIZER).decode([STRING, CHAT], [ids, ids]) == [text, [{"role": "assistant", "content": text}]]


class Upper(type(TOKENIZER)):  # type: ignore[misc]
    def _decode(self, token_ids: Any, **kwargs: Any) -> str:
        return str(super()._decode(token_ids, **kwargs)).upper()


@pytest.mark.parametrize("what", ["its own decoding", "spaces that are cleaned up"])
def test_a_tokenizer_that_does_more_than_its_backend_is_asked_itself(what: str) -> None:
    tokenizer = Upper.from_pretrained(locate("asset:tiny"))
    if what != "its own decoding":
        tokenizer.__class__ = type(TOKENIZER)
        tokenizer.clean_up_tokenization_spaces = True
    assert Codec(tokenizer)._decoder is tokenizer
