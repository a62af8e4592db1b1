"""Admission and order of groups: nothing is trained too late, nothing is lost, nothing waits for ever."""

import heapq
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_exp.rollout.buffer import GroupBuffer, GroupCounts
from grpo_exp.rollout.types import Group, Rollout


def group(serial: int, version: int) -> Group:
    rollout = Rollout([5], np.zeros(1, np.float32), np.full(1, version, np.int32), True)
    return Group(serial, [1], {}, [rollout], version, [0.0])


def finished(buffer: GroupBuffer, versions: list[int]) -> None:
    for serial, version in enumerate(versions):
        buffer.start(serial, version)
        buffer.finish(group(serial, version))


@settings(max_examples=300, deadline=None)
@given(
    data=st.data(),
    prompts_per_step=st.integers(1, 4),
    max_staleness=st.integers(0, 3),
    num_actions=st.integers(1, 60),
)
def test_in_any_order_of_events_no_group_is_late_lost_or_trained_twice(
    data: st.DataObject, prompts_per_step: int, max_staleness: int, num_actions: int
) -> None:
    buffer = GroupBuffer(prompts_per_step, max_staleness)
    version, next_serial = 0, 0
    ended: Counter[int] = Counter()

    def train() -> bool:
        nonlocal version
        assert not buffer.drop_stale(version), "bounded admission leaves nothing to throw away"
        batch = buffer.take(version)
        if batch is None:
            return False
        assert len(batch) == prompts_per_step
        for taken in batch:
            assert 0 <= version - taken.version <= max_staleness
            ended[taken.serial] += 1
        buffer.counts.trained += len(batch)
        version += data.draw(st.booleans(), "the step is applied")
        return True

    for _ in range(num_actions):
        action = data.draw(st.sampled_from(["start", "finish", "finish", "fail", "retry", "train", "train"]))
        if action == "start" and buffer.room():
            for _ in range(data.draw(st.integers(1, buffer.room()), "started")):
                buffer.start(next_serial, version)
                next_serial += 1
        elif action == "train":
            train()
        elif buffer.open and action != "start":
            serial = data.draw(st.sampled_from(sorted(buffer.open)), "group")
            if action == "finish":
                sampled_at = data.draw(st.integers(buffer.open[serial], version), "oldest version of its tokens")
                buffer.finish(group(serial, sampled_at))
            elif action == "fail":
                buffer.fail(serial)
                ended[serial] += 1
            else:
                buffer.restart(serial, version)

    # Whenever everything open is finished, and there is room for no more, a batch can be taken.
    for serial in sorted(buffer.open):
        buffer.finish(group(serial, buffer.open[serial]))
    while buffer.num_held >= prompts_per_step:
        assert train()
    ended.update(buffer.serials())
    buffer.close()
    assert ended == Counter(range(next_serial))


@given(st.integers(1, 4), st.integers(0, 3), st.integers(0, 20))
def test_the_last_groups_are_trained_in_a_smaller_batch(
    prompts_per_step: int, max_staleness: int, num_groups: int
) -> None:
    buffer = GroupBuffer(prompts_per_step, max_staleness)
    sizes = []
    for serial in range(min(num_groups, buffer.room())):
        buffer.start(serial, 0)
        buffer.finish(group(serial, 0))
    held = buffer.num_held
    while batch := buffer.take(0, last=True):
        sizes.append(len(batch))
    assert sum(sizes) == held
    assert all(size == prompts_per_step for size in sizes[:-1])


def test_what_is_older_than_the_bound_is_dropped_and_the_rest_is_kept() -> None:
    """D6: at version 5 with a bound of 2, version 3 is kept, 2 is dropped, 5 is kept."""
    buffer = GroupBuffer(prompts_per_step=2, max_staleness=2)
    finished(buffer, [3, 2, 5])
    assert [dropped.version for dropped in buffer.drop_stale(5)] == [2]
    assert buffer.stale_lags == {3: 1}
    batch = buffer.take(5)
    assert batch is not None
    assert [taken.version for taken in batch] == [3, 5]
    assert buffer.counts.dropped_stale == 1


def test_when_all_are_stale_nothing_is_taken_and_there_is_room_again() -> None:
    """D6: no empty batch."""
    buffer = GroupBuffer(prompts_per_step=2, max_staleness=0)
    finished(buffer, [0, 0])
    assert len(buffer.drop_stale(1)) == 2
    assert buffer.take(1) is None
    assert buffer.room() == 2


def test_surplus_finished_groups_wait_for_the_next_step() -> None:
    """D12: of 10 finished groups, two steps of 4 train 8, and 2 are left."""
    buffer = GroupBuffer(prompts_per_step=4, max_staleness=2)
    finished(buffer, [0] * 10)
    for _ in range(2):
        batch = buffer.take(0)
        assert batch is not None
        buffer.counts.trained += len(batch)
    assert buffer.take(0) is None
    buffer.close()
    assert buffer.counts == GroupCounts(started=10, trained=8, left_over=2)


def test_an_unfinished_group_that_is_due_is_waited_for() -> None:
    buffer = GroupBuffer(prompts_per_step=1, max_staleness=1)
    buffer.start(0, version=0)
    buffer.start(1, version=0)
    buffer.finish(group(1, 0))
    assert buffer.take(0) is not None, "there is one more step in which group 0 can be trained"
    buffer.start(2, version=1)
    buffer.finish(group(2, 1))
    assert buffer.take(1) is None, "group 0 would be too old after this step"
    buffer.finish(group(0, 0))
    batch = buffer.take(1)
    assert batch is not None
    assert batch[0].serial == 0


def test_a_group_that_a_checkpoint_left_open_is_counted_as_started_once() -> None:
    buffer = GroupBuffer(prompts_per_step=1, max_staleness=1, reopened={3, 4}, counts=GroupCounts(started=5, trained=3))
    assert buffer.serials() == [3, 4]
    buffer.start(3, version=0)
    buffer.start(5, version=0)
    assert buffer.counts.started == 6
    buffer.close()
    assert buffer.counts.left_over == 3


def test_groups_that_do_not_add_up_are_an_error() -> None:
    with pytest.raises(RuntimeError, match="do not add up"):
        GroupCounts(started=3, trained=1, left_over=1).check()


@pytest.mark.parametrize("max_staleness", [1, 2, 3])
def test_slow_prompts_are_trained_as_often_as_they_are_offered(max_staleness: int) -> None:
    """D7: half of the prompts take five times longer."""
    buffer = GroupBuffer(prompts_per_step=8, max_staleness=max_staleness)
    rng = np.random.default_rng(0)
    slow: dict[int, bool] = {}
    started_at: dict[int, int] = {}
    ends: list[tuple[float, int]] = []
    trained: list[int] = []
    now = 0.0
    for version in range(40):
        while True:
            for _ in range(buffer.room()):
                serial = len(slow)
                slow[serial] = bool(rng.random() < 0.5)
                buffer.start(serial, version)
                started_at[serial] = version
                heapq.heappush(ends, (now + (5.0 if slow[serial] else 1.0) * rng.uniform(0.8, 1.2), serial))
            assert not buffer.drop_stale(version)
            batch = buffer.take(version)
            if batch is not None:
                break
            now, serial = heapq.heappop(ends)
            buffer.finish(group(serial, started_at[serial]))
        trained += [taken.serial for taken in batch]
        now += 0.5  # the training step
        while ends and ends[0][0] <= now:
            buffer.finish(group(serial := heapq.heappop(ends)[1], started_at[serial]))
    offered_share = np.mean([slow[serial] for serial in slow])
    trained_share = np.mean([slow[serial] for serial in trained])
    assert abs(trained_share - offered_share) < 0.1
    assert buffer.counts.dropped_stale == 0
