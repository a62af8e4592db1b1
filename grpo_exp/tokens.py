"""Text to token ids for prompts, and back for reward functions. Completions are never encoded: ids stay as sampled."""

from collections.abc import Sequence
from typing import Any

from .config.replays import fingerprint
from .errors import ConfigError
from .tasks import Completion, Row


class Codec:
    """Wraps the tokenizer of the policy (``processing_class``)."""

    def __init__(self, tokenizer: Any, max_prompt_tokens: int | None = None) -> None:
        self.tokenizer, self.max_prompt_tokens = tokenizer, max_prompt_tokens
        self._decoder = quickest_decoder(tokenizer)

    def encode(self, rows: Sequence[Row]) -> list[list[int]]:
        """Token ids of prompts: a string as it is, chat messages through the tokenizer's template.

        Raises:
            ConfigError: if a prompt has no tokens, or more than leave room for a completion in the model's context.
        """
        prompts = [row["prompt"] for row in rows]
        strings = [prompt for prompt in prompts if isinstance(prompt, str)]
        # all at once: a call costs more than the few tokens of a prompt
        of_strings = iter(self.tokenizer(strings)["input_ids"] if strings else ())
        found = [next(of_strings) if isinstance(prompt, str) else self._encode_chat(prompt) for prompt in prompts]
        for prompt, ids in zip(prompts, found, strict=True):
            self._check(prompt, len(ids))
        return found

    def _encode_chat(self, messages: list[dict[str, Any]]) -> list[int]:
        ids = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
        return list(ids)

    def _check(self, prompt: Any, num_tokens: int) -> None:
        if not num_tokens:
            raise ConfigError("task", prompt, "prompts of at least one token")
        if self.max_prompt_tokens is not None and num_tokens > self.max_prompt_tokens:
            allowed = f"prompts of at most {self.max_prompt_tokens} tokens"
            fix = "the rest of the model's context is task.max_completion_tokens"
            raise ConfigError("task", f"{str(prompt)[:60]}… ({num_tokens} tokens)", allowed, fix)

    def vocabulary(self) -> str | None:
        """A fingerprint of which id is which token; None where the tokenizer cannot say."""
        known = getattr(self.tokenizer, "get_vocab", None)
        return None if known is None else fingerprint(known())

    def decode(self, rows: Sequence[Row], token_ids: Sequence[list[int]]) -> list[Completion]:
        """Completions as reward functions see them: a string, or an assistant message where the prompt is a chat."""
        texts = [self._decoder.decode(ids, skip_special_tokens=True) for ids in token_ids]
        return [
            text if isinstance(row["prompt"], str) else [{"role": "assistant", "content": text}]
            for row, text in zip(rows, texts, strict=True)
        ]


def quickest_decoder(tokenizer: Any) -> Any:
    """The tokenizers library's own object where that is all that ``decode`` asks, else the tokenizer itself.

    What transformers does around it, such as looking through the ids for tensors, takes longer than decoding a short text.
    """
    from transformers import TokenizersBackend

    if not isinstance(tokenizer, TokenizersBackend) or tokenizer.clean_up_tokenization_spaces:
        return tokenizer
    own = any(getattr(type(tokenizer), name) is not getattr(TokenizersBackend, name) for name in ("decode", "_decode"))
    return tokenizer if own else tokenizer.backend_tokenizer


def load_tokenizer(name_or_path: str, trust_remote_code: bool = False, revision: str | None = None) -> Any:
    from transformers import AutoTokenizer

    kwargs = {} if revision is None else {"revision": revision}
    return AutoTokenizer.from_pretrained(name_or_path, trust_remote_code=trust_remote_code, **kwargs)
