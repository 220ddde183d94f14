"""What crosses the wire comes out as it went in, and what is unset is told from zero."""

from array import array

import pytest

from proa.engine.v1 import core_pb2, service_pb2
from proa_engine.core.sampling_params import SamplingParams
from proa_engine.core.types import (
    EngineCoreOutput,
    Event,
    EventType,
    FinishReason,
    SchedulerStats,
    TokenLogprobs,
)
from proa_engine.server import convert
from proa_engine.server.errors import Draining, InvalidRequest
from proa_engine.server.pending import OutputBatch

NOW = 1000.0


def request_message(**fields: object) -> core_pb2.EngineCoreRequest:
    values = {"request_id": "r", "prompt_token_ids": array("I", [1, 2]).tobytes()} | fields
    return core_pb2.EngineCoreRequest(**values)  # type: ignore[arg-type]


def test_unset_sampling_params_get_the_documented_defaults() -> None:
    params = convert.sampling_params_from_pb(core_pb2.SamplingParams())

    assert params.key is not None
    assert params == SamplingParams(max_tokens=None, key=params.key)


def test_unset_keys_are_drawn_apart() -> None:
    keys = {convert.sampling_params_from_pb(core_pb2.SamplingParams()).key for _ in range(4)}

    assert len(keys) == 4


def test_zero_is_not_unset() -> None:
    params = convert.sampling_params_from_pb(core_pb2.SamplingParams(temperature=0, key=0, logprobs=0))

    assert (params.temperature, params.key, params.logprobs, params.prompt_logprobs) == (0.0, 0, 0, None)


def test_every_sampling_parameter_arrives() -> None:
    message = core_pb2.SamplingParams(
        key=2**64 - 1,
        temperature=0.5,
        top_p=0.25,
        top_k=7,
        min_p=0.125,
        presence_penalty=1.5,
        frequency_penalty=-1.5,
        repetition_penalty=2,
        logit_bias={3: 0.5},
        allowed_token_ids=[1, 2],
        bad_words=[core_pb2.TokenSequence(token_ids=[4, 5])],
        max_tokens=9,
        min_tokens=3,
        stop_token_ids=[6],
        ignore_eos=True,
        logprobs=2,
        prompt_logprobs=1,
    )

    assert convert.sampling_params_from_pb(message) == SamplingParams(
        key=2**64 - 1,
        temperature=0.5,
        top_p=0.25,
        top_k=7,
        min_p=0.125,
        presence_penalty=1.5,
        frequency_penalty=-1.5,
        repetition_penalty=2.0,
        logit_bias={3: 0.5},
        allowed_token_ids=(1, 2),
        bad_words_token_ids=((4, 5),),
        max_tokens=9,
        min_tokens=3,
        stop_token_ids=(6,),
        ignore_eos=True,
        logprobs=2,
        prompt_logprobs=1,
    )


def test_request_arrives_whole() -> None:
    message = request_message(
        priority=-3,
        cache_salt="salt",
        trace_headers={"traceparent": "00-1"},
        resumed_token_ids=array("I", [7]).tobytes(),
        arrival_time=12.5,
    )

    request = convert.request_from_pb(message, now=NOW)

    assert (request.request_id, list(request.prompt_token_ids)) == ("r", [1, 2])
    assert (request.priority, request.cache_salt, request.trace_headers) == (-3, "salt", {"traceparent": "00-1"})
    assert (list(request.resumed_token_ids), request.arrival_time) == ([7], 12.5)


def test_unset_id_and_arrival_time_are_filled_in() -> None:
    first, second = (convert.request_from_pb(request_message(request_id=""), now=NOW) for _ in range(2))

    assert first.request_id != second.request_id
    assert first.arrival_time == NOW


def test_trace_context_of_the_call_stands_in_for_the_requests_own() -> None:
    metadata = (("traceparent", "00-2"), ("user-agent", "x"))

    without = convert.request_from_pb(request_message(), now=NOW, metadata=metadata)
    with_own = convert.request_from_pb(
        request_message(trace_headers={"traceparent": "00-1"}), now=NOW, metadata=metadata
    )

    assert without.trace_headers == {"traceparent": "00-2"}
    assert with_own.trace_headers == {"traceparent": "00-1"}


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"prompt_token_ids": b"123"}, "prompt_token_ids must be little-endian uint32"),
        ({"resumed_token_ids": b"1"}, "resumed_token_ids must be little-endian uint32"),
        ({"request_id": "é" * 129}, "request_id must not be longer than 256 bytes"),
        ({"arrival_time": -1.0}, "arrival_time must be"),
        ({"arrival_time": float("nan")}, "arrival_time must be"),
        ({"sampling_params": core_pb2.SamplingParams(temperature=float("nan"))}, "temperature must be finite"),
        ({"sampling_params": core_pb2.SamplingParams(top_p=0)}, "top_p must be greater than 0"),
        ({"sampling_params": core_pb2.SamplingParams(max_tokens=0)}, "max_tokens must be at least 1"),
        ({"sampling_params": core_pb2.SamplingParams(bad_words=[core_pb2.TokenSequence()])}, "bad_words_token_ids"),
    ],
)
def test_bad_field_is_named(fields: dict[str, object], sentence: str) -> None:
    with pytest.raises(InvalidRequest, match=sentence):
        convert.request_from_pb(request_message(**fields), now=NOW)


def test_output_says_everything() -> None:
    output = EngineCoreOutput(
        request_id="r",
        client=1,
        new_token_ids=[4, 5],
        logprobs=[TokenLogprobs(4, -0.5, 1, [4, 9], [-0.5, -1.0]), TokenLogprobs(5, -2.0, 3)],
        prompt_logprobs=[TokenLogprobs(2, -0.25, 2)],
        finish_reason=FinishReason.STOP,
        stop_reason=0,
        events=[Event(EventType.QUEUED, 1.5), Event(EventType.FINISHED, 2.5)],
        num_prompt_tokens=3,
        num_output_tokens=2,
        error="",
    )

    message = convert.output_to_pb(output)

    assert message.request_id == "r"
    assert list(message.new_token_ids) == [4, 5]
    assert message.logprobs[0] == core_pb2.TokenLogprobs(
        token_id=4, logprob=-0.5, rank=1, top_token_ids=[4, 9], top_logprobs=[-0.5, -1.0]
    )
    assert message.prompt_logprobs[0].rank == 2
    assert message.finish_reason == core_pb2.FINISH_REASON_STOP
    assert message.HasField("stop_reason")
    assert message.stop_reason == 0
    assert [(event.type, event.timestamp) for event in message.events] == [(1, 1.5), (6, 2.5)]
    assert message.HasField("num_cached_tokens")
    assert (message.num_prompt_tokens, message.num_cached_tokens, message.num_output_tokens) == (3, 0, 2)


def test_output_in_a_session_has_a_handle_instead_of_an_id() -> None:
    message = convert.output_to_pb(EngineCoreOutput(request_id="r", client=1), handle=7)

    assert (message.request_id, message.handle) == ("", 7)
    assert not message.HasField("stop_reason")
    assert not message.HasField("num_output_tokens")


def test_plain_tokens_travel_as_little_endian_columns() -> None:
    batch = OutputBatch(array("I", [1, 2]), array("I", [300, 4]))

    outputs = convert.outputs_to_pb(batch, SchedulerStats(num_running_reqs=2), 0.5, 9.0, 4).outputs

    assert outputs.plain_handles == b"\x01\0\0\0\x02\0\0\0"
    assert outputs.plain_token_ids == b"\x2c\x01\0\0\x04\0\0\0"
    assert (outputs.stats.num_running_reqs, outputs.stats.last_step_age) == (2, 0.5)
    assert (outputs.timestamp, outputs.step) == (9.0, 4)


def test_session_messages_become_what_they_say() -> None:
    open_message = service_pb2.SessionRequest(open=service_pb2.OpenSession(client_id="g"))
    abort = service_pb2.SessionRequest(abort=service_pb2.AbortHandles(handles=[1, 2]))
    bad = service_pb2.SessionRequest(add=service_pb2.AddRequest(handle=3, request=request_message(arrival_time=-1)))

    assert convert.session_message_from_pb(open_message, now=NOW) == convert.Open("g")
    assert convert.session_message_from_pb(abort, now=NOW) == convert.AbortHandles((1, 2))
    add = convert.session_message_from_pb(bad, now=NOW)
    assert isinstance(add, convert.Add)
    assert (add.handle, type(add.request)) == (3, InvalidRequest)


@pytest.mark.parametrize(
    "message", [None, service_pb2.SessionRequest(), service_pb2.SessionRequest(add=service_pb2.AddRequest())]
)
def test_session_message_that_says_nothing_breaks_the_session(message: service_pb2.SessionRequest | None) -> None:
    with pytest.raises(InvalidRequest):
        convert.session_message_from_pb(message, now=NOW)


def test_rejection_carries_code_and_whether_another_engine_may_take_it() -> None:
    rejected = convert.rejected_to_pb(5, Draining("going")).rejected

    assert (rejected.handle, rejected.code, rejected.message, rejected.retryable) == (5, 14, "going", True)


def test_files_travel_in_parts_of_bounded_size() -> None:
    data = bytes(range(256)) * 2049

    parts = list(convert.tokenizer_files_to_pb([("a", b""), ("b", data)]))

    assert [part.file_name for part in parts] == ["a", "b", "b", "b"]
    assert b"".join(part.data for part in parts) == data
    assert max(len(part.data) for part in parts) == convert.FILE_PART_BYTES
