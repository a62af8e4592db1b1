"""Reward functions in a module of their own: their process imports nothing else."""

from typing import Any


def num_letters(prompts: list[str], completions: list[str], **columns: Any) -> list[int]:
    """How many different letters a completion has."""
    return [len(set(completion)) for completion in completions]
