"""The order of prompts is one number, the serial of a group."""

from hypothesis import given
from hypothesis import strategies as st

from grpo_exp.rollout.stream import PromptStream


def stream(size: int, seed: int = 0, max_epochs: int | None = None) -> PromptStream:
    return PromptStream([{"prompt": str(index)} for index in range(size)], seed, max_epochs)


@given(st.integers(1, 30), st.integers(0, 5), st.integers(0, 3))
def test_every_epoch_takes_every_row_once(size: int, seed: int, epoch: int) -> None:
    rows = [stream(size, seed).index(serial) for serial in range(epoch * size, (epoch + 1) * size)]
    assert sorted(rows) == list(range(size))


def test_the_order_depends_on_seed_and_epoch_alone() -> None:
    orders = [[stream(50, seed).index(serial) for serial in range(100)] for seed in (0, 0, 1)]
    assert orders[0] == orders[1]
    assert orders[0] != orders[2]
    assert orders[0][:50] != orders[0][50:]


def test_a_row_is_found_from_any_serial_in_any_order() -> None:
    one, other = stream(7), stream(7)
    forwards = [one.row(serial)["prompt"] for serial in range(30)]
    backwards = [other.row(serial)["prompt"] for serial in reversed(range(30))]
    assert forwards == backwards[::-1]


def test_serials_end_with_the_last_epoch() -> None:
    prompts = stream(3, max_epochs=2)
    assert prompts.next_serials(4) == [0, 1, 2, 3]
    assert not prompts.exhausted
    assert prompts.next_serials(4) == [4, 5]
    assert prompts.exhausted
    assert prompts.next_serials(4) == []


def test_serials_that_were_open_come_first_after_a_resume() -> None:
    prompts = stream(4, max_epochs=1)
    prompts.cursor, prompts.again = 4, [1, 3]
    assert not prompts.exhausted
    assert prompts.next_serials(1) == [1]
    assert prompts.next_serials(5) == [3]
    assert prompts.exhausted


def test_without_a_bound_the_stream_never_ends() -> None:
    assert stream(1).next_serials(5) == [0, 1, 2, 3, 4]
