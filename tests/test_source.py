"""From prompts to batches: what is not usable is dropped and counted, and nothing waits for ever."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from engines import ScriptedPool, completed
from small_runs import small_config

from grpo_exp import jsonl
from grpo_exp.batch import build_batch
from grpo_exp.config.schema import AlgoConfig, Config
from grpo_exp.errors import Interrupted, RunFailed
from grpo_exp.rollout.pool import Failed, Item
from grpo_exp.rollout.source import RolloutSource
from grpo_exp.rollout.types import Generated, Request
from grpo_exp.tasks import Row, Task
from grpo_exp.tasks.shortest import reward
from grpo_exp.tokens import Codec

Answer = Callable[[Request, int], Item | None]


class Letters:
    """A tokenizer that forgets: all it decodes is ``x``, whatever it is."""

    def __call__(self, texts: list[str]) -> dict[str, list[list[int]]]:
        return {"input_ids": [[10 + ord(letter) % 10 for letter in text] for text in texts]}

    def decode(self, token_ids: list[int], skip_special_tokens: bool) -> str:
        return "x"


def make_source(
    answer: Answer,
    *overrides: str,
    config: Config | None = None,
    functions: Any = (reward,),
    should_stop: Callable[[], bool] = lambda: False,
    num_prompts: int = 64,
) -> tuple[RolloutSource, list[dict[str, Any]]]:
    """A source over a scripted pool, and the list of its events."""
    rows: list[Row] = [{"prompt": f"prompt {index}"} for index in range(num_prompts)]
    config = config or small_config("task=shortest", "trainer.prompts_per_step=2", "algo.group_size=3", *overrides)
    events: list[dict[str, Any]] = []

    def on_event(name: str, body: dict[str, Any]) -> None:
        events.append({"event": name} | jsonl.plain(body))

    pool: Any = ScriptedPool(answer)
    task = Task("letters", rows, rows[:2], list(functions))
    return RolloutSource(config, task, Codec(Letters()), pool, on_event, should_stop), events


def serials(batch: Any) -> list[int]:
    return [group.serial for group in batch]


def test_token_ids_stay_as_they_were_sampled() -> None:
    """B12: with a tokenizer that does not give back what it was given."""
    sampled = [33, 7, 41, 9, 2]
    source, _ = make_source(lambda request, version: completed(request, version, sampled))
    batch = source.next_batch(None)
    assert batch is not None
    assert all(rollout.token_ids == sampled for group in batch for rollout in group.rollouts)
    step = build_batch(batch, AlgoConfig(group_size=3), 8, 4096, torch.device("cpu"))
    assert torch.cat([part.tokens.tokens for part in step.micro_batches]).tolist() == sampled * 6


def spoiled(generated: Generated, what: str) -> Generated:
    first, *rest = generated.rollouts
    match what:
        case "a log-prob is missing":
            bad = first._replace(mu=first.mu[:-1])
        case "a log-prob is NaN":
            bad = first._replace(mu=np.array([-1.0, np.nan, -1.0], np.float32))
        case "no tokens":
            bad = first._replace(token_ids=[], mu=first.mu[:0], versions=first.versions[:0])
        case "a completion is missing":
            return replace(generated, rollouts=rest)
    return replace(generated, rollouts=[bad, *rest])


@pytest.mark.parametrize("what", ["a log-prob is missing", "a log-prob is NaN", "no tokens", "a completion is missing"])
def test_a_group_that_is_not_whole_is_dropped_and_counted_never_padded(what: str) -> None:
    """B12"""

    def answer(request: Request, version: int) -> Item:
        generated = completed(request, version)
        return spoiled(generated, what) if request.serial == 1 else generated

    source, events = make_source(answer)
    assert serials(source.next_batch(None)) == [0, 2]
    assert source.buffer.counts.dropped_failed == 1
    assert [(event["event"], event["group"]) for event in events] == [("failed_group", 1)]


def test_a_request_that_was_tried_often_enough_is_dropped_and_its_place_is_taken() -> None:
    """D3"""
    source, events = make_source(lambda r, v: Failed(r.serial, "no answer") if r.serial == 0 else completed(r, v))
    assert serials(source.next_batch(None)) == [1, 2]
    assert events[0]["prompt"] == source.stream.index(0)
    assert source.buffer.counts.dropped_failed == 1


def test_rollouts_of_old_weights_are_dropped_and_fresh_ones_waited_for() -> None:
    """D6: all samples of a step are stale: no crash, no empty batch; the histogram of lags is written down."""

    def answer(request: Request, version: int) -> Item:
        return completed(request, 2 if request.serial < 4 else version)

    source, events = make_source(answer)
    source.publish(5, torch.nn.Identity())
    batch = source.next_batch(None)
    assert batch is not None
    assert [group.version for group in batch] == [5, 5]
    assert source.buffer.counts.dropped_stale == 4
    assert [event["lag"] for event in events] == [3] * 4
    assert events[-1]["lags"] == {"3": 4}


def test_the_version_of_a_group_is_the_oldest_of_its_tokens() -> None:
    """D6"""

    def answer(request: Request, version: int) -> Item:
        generated = completed(request, 4)
        mixed = generated.rollouts[1]._replace(versions=np.array([3, 4, 4], np.int32))
        return replace(generated, rollouts=[generated.rollouts[0], mixed, generated.rollouts[2]])

    source, _ = make_source(answer)
    source.publish(4, torch.nn.Identity())
    batch = source.next_batch(None)
    assert batch is not None
    assert [group.version for group in batch] == [3, 3]


def test_a_stop_is_seen_though_batches_are_always_ready() -> None:
    stopped = False
    source, _ = make_source(completed, should_stop=lambda: stopped)
    for _ in range(3):
        assert source.next_batch(None) is not None
    stopped = True
    with pytest.raises(Interrupted):
        source.next_batch(None)


@pytest.mark.parametrize(
    "answer", [lambda r, v: None, lambda r, v: Failed(r.serial, "broken")], ids=["no answers", "nothing but failures"]
)
def test_without_a_finished_group_the_run_fails_in_time(answer: Answer) -> None:
    """D1: nothing waits for ever, however the groups fail."""
    source, _ = make_source(answer, "trainer.stall_timeout_s=0.3")
    start = time.monotonic()
    with pytest.raises(RunFailed, match=r"no group was finished in 0.3 s: \d+ groups open"):
        source.next_batch(None)
    assert time.monotonic() - start < 5


def test_rewards_that_always_fail_are_skipped_only_as_long_as_the_run_may_stall() -> None:
    """C5: policy skip."""

    def raising(completions: list[Any], **columns: Any) -> list[float]:
        raise ValueError("never a reward")

    overrides = "trainer.stall_timeout_s=3", "task.reward_errors=skip"
    source, events = make_source(completed, *overrides, functions=[raising])
    try:
        with pytest.raises(RunFailed, match="no group was finished"):
            source.next_batch(None)
    finally:
        source.close()
    assert events
    assert {event["event"] for event in events} == {"failed_group"}
    assert "never a reward" in events[0]["reason"]


def test_an_evaluation_that_fails_ends_the_run() -> None:
    source, _ = make_source(lambda request, version: Failed(request.serial, "broken"))
    with pytest.raises(RunFailed, match="evaluation failed: broken"):
        source.evaluate(0)


def test_evaluation_leaves_the_groups_of_training_alone() -> None:
    source, _ = make_source(completed)
    source._start_groups(None)
    evaluation = source.evaluate(0)
    assert evaluation.reward == -3.0
    assert serials(source.next_batch(None)) == [0, 1]


def test_no_more_groups_are_started_than_the_steps_that_are_left_can_train() -> None:
    source, _ = make_source(completed)
    assert source.next_batch(2) is not None
    assert source.next_batch(1) is not None
    assert source.buffer.counts.started == 4
    assert source.buffer.num_held == 0


def test_the_end_of_the_data_comes_in_a_smaller_batch() -> None:
    source, _ = make_source(completed, "trainer.max_epochs=1", num_prompts=5)
    sizes = []
    while batch := source.next_batch(None):
        sizes.append(len(batch))
    assert sizes == [2, 2, 1]


def test_a_resumed_source_starts_the_open_groups_again_first_with_the_same_seeds() -> None:
    """D9"""
    first, _ = make_source(completed, "trainer.max_epochs=1", num_prompts=8)
    batch = first.next_batch(None)
    assert batch is not None
    first.buffer.counts.trained += len(batch)
    cursor, still_open, counts = first.stream.cursor, first.buffer.serials(), vars(first.buffer.counts).copy()
    assert still_open == [2, 3]
    for _ in range(2):  # resumed once more before anything was started: counts stay right
        second, _ = make_source(completed, "trainer.max_epochs=1", num_prompts=8)
        second.resume(cursor, still_open, counts)
        cursor, still_open, counts = second.stream.cursor, second.buffer.serials(), vars(second.buffer.counts).copy()
    trained = serials(batch)
    while batch := second.next_batch(None):
        trained += serials(batch)
        second.buffer.counts.trained += len(batch)
    assert trained == list(range(8))
    second.buffer.close()
    assert second.buffer.counts.started == 8
    pools: Any = first.pool, second.pool
    before, after = ({request.serial: request.seed for request in pool.requests} for pool in pools)
    assert all(after[serial] == before[serial] for serial in (2, 3))
