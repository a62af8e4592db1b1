"""The prompts of a probe: fixed, so that every cell, and the next probe, has the same ones."""

from typing import Any

from .. import assets, tasks
from ..config.schema import Config
from ..errors import ConfigError
from ..tasks import Row
from ..tokens import Codec, load_tokenizer
from .settings import ProbeSettings, Prompts


def encoded(config: Config, settings: ProbeSettings, max_tokens: int | None) -> tuple[Prompts, list[list[int]]]:
    """Where the prompts come from, and the token ids of each.

    Raises:
        ConfigError: if there are fewer than asked for, or one leaves no room for its completion.
    """
    name, revision = config.model.tokenizer or config.model.name_or_path, config.model.init_kwargs.get("revision")
    tokenizer = load_tokenizer(assets.locate(name), config.model.trust_remote_code, revision)
    source = settings.prompts_from
    if source is Prompts.auto:
        source = Prompts.questions if getattr(tokenizer, "chat_template", None) else Prompts.task
    rows = questions() if source is Prompts.questions else of_task(config, settings.num_prompts)
    if len(rows) < settings.num_prompts:
        fix = "probe.num_completions samples each more than once"
        raise ConfigError("probe.num_prompts", settings.num_prompts, f"at most {len(rows)} of these", fix)
    codec = Codec(tokenizer, None if max_tokens is None else max_tokens - settings.max_new_tokens)
    return source, codec.encode(rows[: settings.num_prompts])


def questions() -> list[Row]:
    lines = assets.path("questions.txt").read_text(encoding="utf-8").splitlines()
    return [{"prompt": [{"role": "user", "content": line}]} for line in lines]


def of_task(config: Config, count: int) -> list[Row]:
    """Prompts that are evaluated on, or else those that are trained on."""
    task = tasks.build(config.task)
    rows: list[Any] = task.eval if len(task.eval) >= count else task.train
    return rows
