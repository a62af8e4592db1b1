"""A reward function of one's own, for `task=jsonl`: called once per group, lists with one entry per completion."""


def reward(completions: list[str], answer: list[str], **columns: object) -> list[float]:
    """Half for the whole answer, half for the share of positions that are right."""
    return [score(text, right) for text, right in zip(completions, answer, strict=True)]


def score(text: str, right: str) -> float:
    share = sum(a == b for a, b in zip(text, right, strict=False)) / len(right)
    return 0.5 * (text == right) + 0.5 * share
