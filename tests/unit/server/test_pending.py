"""Unsent outputs merge into one message without loss."""

import tracemalloc
from array import array
from collections.abc import Callable

import pytest

from proa.contract import EngineCoreOutput, Event, EventType, FinishReason, TokenLogprobs
from proa_engine.server.pending import PendingOutputs


def output(*token_ids: int, **fields: object) -> EngineCoreOutput:
    return EngineCoreOutput(request_id="r", client_index=1, new_token_ids=token_ids, **fields)  # type: ignore[arg-type]


def test_plain_tokens_go_to_the_columns() -> None:
    pending = PendingOutputs()
    pending.extend([(1, output(10))])
    pending.extend([(2, output(20))])

    batch = pending.take()

    assert (list(batch.plain_handles), list(batch.plain_token_ids)) == ([1, 2], [10, 20])
    assert batch.outputs == []


def test_later_steps_append_to_the_columns_in_order() -> None:
    pending = PendingOutputs()
    for token_id in (10, 11, 12):
        pending.extend([(1, output(token_id))])

    batch = pending.take()

    assert (list(batch.plain_handles), list(batch.plain_token_ids)) == ([1, 1, 1], [10, 11, 12])


def test_columns_of_plain_tokens_are_joined_but_for_requests_with_an_entry() -> None:
    pending = PendingOutputs()
    pending.extend_plain(array("I", (1, 2, 3)), [10, 20, 30])
    pending.extend([(2, output(21, events=[Event(EventType.FIRST_TOKEN, 1.0)]))])
    pending.extend_plain(array("I", (1, 2, 3)), [11, 22, 31])
    num_bytes = pending.num_bytes

    batch = pending.take()

    assert list(batch.plain_handles) == [1, 2, 3, 1, 3]
    assert list(batch.plain_token_ids) == [10, 20, 30, 11, 31]
    assert [list(entry.new_token_ids) for entry in batch.outputs] == [[21, 22]]
    assert num_bytes > 6 * 8


def test_plain_token_after_an_entry_merges_into_the_entry() -> None:
    pending = PendingOutputs()
    pending.extend([(1, output(10, events=[Event(EventType.FIRST_TOKEN, 1.0)]))])
    pending.extend([(1, output(11))])
    pending.extend([(1, output(12, finish_reason=FinishReason.STOP, stop_reason=12, num_output_tokens=3))])

    batch = pending.take()

    assert list(batch.plain_handles) == []
    (merged,) = batch.outputs
    assert (merged.handle, merged.request_id) == (1, "")
    assert list(merged.new_token_ids) == [10, 11, 12]
    assert [event.type for event in merged.events] == [EventType.FIRST_TOKEN]
    assert (merged.finish_reason, merged.stop_reason, merged.num_output_tokens) == (FinishReason.STOP, 12, 3)


def test_entry_after_plain_tokens_keeps_both() -> None:
    pending = PendingOutputs()
    pending.extend([(1, output(10))])
    pending.extend([(1, output(11, finish_reason=FinishReason.LENGTH))])

    batch = pending.take()

    assert list(batch.plain_token_ids) == [10]
    assert [list(entry.new_token_ids) for entry in batch.outputs] == [[11]]


def test_logprobs_are_joined() -> None:
    pending = PendingOutputs()
    for token_id in (1, 2):
        pending.extend([(7, output(token_id, logprobs=(TokenLogprobs(token_id, -1.0, 1),)))])

    (merged,) = pending.take().outputs
    assert [entry.token_id for entry in merged.logprobs] == [1, 2]


def test_size_grows_with_pending_outputs_and_is_reset_by_take() -> None:
    pending = PendingOutputs()
    pending.extend([(1, output(1))])
    plain = pending.num_bytes
    pending.extend([(2, output(1, logprobs=(TokenLogprobs(1, -1.0, 1, [1] * 20, [0.0] * 20),)))])

    assert 0 < plain < pending.num_bytes - 160
    pending.take()
    assert pending.num_bytes == 0


def test_finished_handles_are_returned() -> None:
    pending = PendingOutputs()

    finished = pending.extend([(1, output(10)), (2, output(12, finish_reason=FinishReason.STOP))])

    assert finished == [2]
    assert list(pending.take().plain_token_ids) == [10]


def logprobs(num_top: int, seed: int) -> TokenLogprobs:
    top = [1000 * seed + each for each in range(num_top)]
    return TokenLogprobs(1000 + seed, -1.0 / (seed + 2), 300 + seed, top, [-2.0 / (each + 3) for each in top])


@pytest.mark.parametrize("num_handles", [1, 1000])
@pytest.mark.parametrize(
    "make",
    [
        lambda index: output(*range(1000 + index, 1008 + index)),
        lambda index: output(1000 + index, logprobs=[logprobs(0, index)]),
        lambda index: output(1000 + index, logprobs=[logprobs(20, index)]),
        lambda index: output(prompt_logprobs=[logprobs(5, index + each) for each in range(50)]),
    ],
)
def test_the_bytes_that_unread_outputs_hold_are_counted(
    make: Callable[[int], EngineCoreOutput], num_handles: int
) -> None:
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    pending = PendingOutputs()
    for index in range(1000):
        pending.extend([(index % num_handles, make(index))])
    held = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()

    assert 0.8 * held < pending.num_bytes < 2 * held
