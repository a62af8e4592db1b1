"""Text to token ids for prompts, and back for reward functions. Completions are never encoded: ids stay as sampled."""

from typing import Any

from .errors import ConfigError
from .tasks import Row


class Codec:
    """Wraps the tokenizer of the policy (``processing_class``)."""

    def __init__(self, tokenizer: Any, max_prompt_tokens: int | None = None) -> None:
        self.tokenizer, self.max_prompt_tokens = tokenizer, max_prompt_tokens

    def encode(self, row: Row) -> list[int]:
        """Token ids of a prompt: a string as it is, chat messages through the tokenizer's template.

        Raises:
            ConfigError: if the prompt has no tokens, or more than leave room for a completion in the model's context.
        """
        prompt = row["prompt"]
        if isinstance(prompt, str):
            ids = self.tokenizer(prompt)["input_ids"]
        else:
            ids = self.tokenizer.apply_chat_template(
                prompt, add_generation_prompt=True, tokenize=True, return_dict=False
            )
        if not ids:
            raise ConfigError("task", prompt, "prompts of at least one token")
        if self.max_prompt_tokens is not None and len(ids) > self.max_prompt_tokens:
            allowed = f"prompts of at most {self.max_prompt_tokens} tokens"
            fix = "the rest of the model's context is task.max_completion_tokens"
            raise ConfigError("task", f"{str(prompt)[:60]}… ({len(ids)} tokens)", allowed, fix)
        return list(ids)

    def decode(self, row: Row, token_ids: list[int]) -> str | list[dict[str, str]]:
        """A completion as reward functions see it: a string, or an assistant message where the prompt is a chat."""
        text: str = self.tokenizer.decode(token_ids, skip_special_tokens=True)
        return text if isinstance(row["prompt"], str) else [{"role": "assistant", "content": text}]


def load_tokenizer(name_or_path: str, trust_remote_code: bool = False, revision: str | None = None) -> Any:
    from transformers import AutoTokenizer

    kwargs = {} if revision is None else {"revision": revision}
    return AutoTokenizer.from_pretrained(name_or_path, trust_remote_code=trust_remote_code, **kwargs)
