"""The engine server's own conversions: defaults that it fills in, errors, session messages."""

from array import array

import pytest

from proa.contract import PoolingTask, SamplingParams, SessionClaim
from proa.contract.pb import to_pb
from proa.engine.v1 import core_pb2, service_pb2
from proa_engine.core.admission.validation import LengthLimits, ModelLimits, check_request
from proa_engine.core.kv_events import KvChanges
from proa_engine.server import convert
from proa_engine.server.errors import Draining, InvalidRequest
from proa_engine.server.kv_events import TierChanges

NOW = 1000.0
VOCAB = 10


def request_message(**fields: object) -> core_pb2.EngineCoreRequest:
    values = {"request_id": "r", "prompt_token_ids": array("I", [1, 2]).tobytes()} | fields
    return core_pb2.EngineCoreRequest(**values)  # type: ignore[arg-type]


def test_each_request_without_a_key_gets_one_of_its_own() -> None:
    keys = {convert.request_from_pb(request_message(), now=NOW, vocab_size=VOCAB).sampling_params.key for _ in range(4)}

    assert None not in keys
    assert len(keys) == 4


def test_key_of_zero_is_kept() -> None:
    message = request_message(sampling_params=core_pb2.SamplingParams(key=0))

    assert convert.request_from_pb(message, now=NOW, vocab_size=VOCAB).sampling_params.key == 0


def test_request_arrives_whole() -> None:
    message = request_message(
        priority=-3,
        cache_salt="salt",
        trace_headers={"traceparent": "00-1"},
        resumed_token_ids=array("I", [7]).tobytes(),
        arrival_time=12.5,
    )

    request = convert.request_from_pb(message, now=NOW, vocab_size=VOCAB)

    assert (request.request_id, list(request.prompt_token_ids)) == ("r", [1, 2])
    assert (request.priority, request.cache_salt, request.trace_headers) == (-3, "salt", {"traceparent": "00-1"})
    assert (list(request.resumed_token_ids), request.arrival_time) == ([7], 12.5)


def test_unset_id_and_arrival_time_are_filled_in() -> None:
    first, second = (
        convert.request_from_pb(request_message(request_id=""), now=NOW, vocab_size=VOCAB) for _ in range(2)
    )

    assert first.request_id != second.request_id
    assert first.arrival_time == NOW


def test_trace_context_of_the_call_stands_in_for_the_requests_own() -> None:
    metadata = (("traceparent", "00-2"), ("user-agent", "x"))

    without = convert.request_from_pb(request_message(), now=NOW, vocab_size=VOCAB, metadata=metadata)
    with_own = convert.request_from_pb(
        request_message(trace_headers={"traceparent": "00-1"}), now=NOW, vocab_size=VOCAB, metadata=metadata
    )

    assert without.trace_headers == {"traceparent": "00-2"}
    assert with_own.trace_headers == {"traceparent": "00-1"}


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"prompt_token_ids": b"123"}, "prompt_token_ids must be little-endian uint32"),
        ({"resumed_token_ids": b"1"}, "resumed_token_ids must be little-endian uint32"),
        ({"request_id": "é" * 129}, "request_id must not be longer than 256 bytes"),
        ({"tenant": "é" * 129}, "tenant must not be longer than 256 bytes"),
        ({"arrival_time": -1.0}, "arrival_time must be"),
        ({"arrival_time": float("nan")}, "arrival_time must be"),
        ({"kv_source": core_pb2.KvSource()}, "kv_source must have the addresses"),
        ({"kv_source": core_pb2.KvSource(addresses=["a:1"] * 1025)}, "kv_source must have at most 1024 addresses"),
        ({"kv_source": core_pb2.KvSource(addresses=["a" * 301])}, "of at most 300 characters"),
        ({"sampling_params": core_pb2.SamplingParams(temperature=float("nan"))}, "temperature must be finite"),
        ({"sampling_params": core_pb2.SamplingParams(top_p=0)}, "top_p must be greater than 0"),
        ({"sampling_params": core_pb2.SamplingParams(max_tokens=0)}, "max_tokens must be at least 1"),
        (
            {"sampling_params": core_pb2.SamplingParams(bad_words_token_ids=[core_pb2.TokenSequence()])},
            "bad_words_token_ids",
        ),
    ],
)
def test_bad_field_is_named(fields: dict[str, object], sentence: str) -> None:
    with pytest.raises(InvalidRequest, match=sentence):
        convert.request_from_pb(request_message(**fields), now=NOW, vocab_size=VOCAB)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("allowed_token_ids", [1] * 11),
        ("stop_token_ids", [1] * 11),
        ("logprob_token_ids", [1] * 11),
        ("logit_bias", dict.fromkeys(range(11), 1.0)),
        ("bad_words_token_ids", [core_pb2.TokenSequence(token_ids=[1])] * 11),
        ("bad_words_token_ids", [core_pb2.TokenSequence(token_ids=[1] * 6)] * 2),
    ],
)
def test_a_list_longer_than_the_vocabulary_is_refused_before_it_is_read(
    name: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = request_message(sampling_params=core_pb2.SamplingParams(**{name: value}))  # type: ignore[arg-type]
    monkeypatch.setattr(convert, "from_pb", lambda *_: pytest.fail("the list was read"))
    with pytest.raises(InvalidRequest, match=f"{name} must have at most 10 token ids, the vocabulary, got 1[12]"):
        convert.request_from_pb(message, now=NOW, vocab_size=VOCAB)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("score_token_ids", {"pooling_params": {"score_token_ids": [1] * 11}}),
        ("start_after", {"sampling_params": {"grammar": {"start_after": [1] * 11}}}),
    ],
)
def test_lists_elsewhere_are_limited_too(name: str, message: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest, match=f"{name} must have at most 10 token ids"):
        convert.request_from_pb(request_message(**message), now=NOW, vocab_size=VOCAB)


def test_session_messages_become_what_they_say() -> None:
    open_message = service_pb2.SessionRequest(open=service_pb2.OpenSession(client_id="g"))
    abort = service_pb2.SessionRequest(abort=service_pb2.AbortHandles(handles=[1, 2]))
    bad = service_pb2.SessionRequest(add=service_pb2.AddRequest(handle=3, request=request_message(arrival_time=-1)))

    assert convert.session_message_from_pb(open_message, now=NOW, vocab_size=VOCAB) == convert.Open("g")
    assert convert.session_message_from_pb(abort, now=NOW, vocab_size=VOCAB) == convert.AbortHandles((1, 2))
    claim = service_pb2.SessionRequest(claim=service_pb2.SessionClaim(num_blocks=3, longest_wait=1.5))
    assert convert.session_message_from_pb(claim, now=NOW, vocab_size=VOCAB) == SessionClaim(3, 1.5)
    add = convert.session_message_from_pb(bad, now=NOW, vocab_size=VOCAB)
    assert isinstance(add, convert.Add)
    assert (add.handle, type(add.request)) == (3, InvalidRequest)


@pytest.mark.parametrize(
    "message", [None, service_pb2.SessionRequest(), service_pb2.SessionRequest(add=service_pb2.AddRequest())]
)
def test_session_message_that_says_nothing_breaks_the_session(message: service_pb2.SessionRequest | None) -> None:
    with pytest.raises(InvalidRequest):
        convert.session_message_from_pb(message, now=NOW, vocab_size=VOCAB)


def test_rejection_carries_code_and_whether_another_engine_may_take_it() -> None:
    rejected = convert.rejected_to_pb(5, Draining("going")).rejected

    assert (rejected.handle, rejected.code, rejected.message, rejected.retryable) == (5, 14, "going", True)


def test_files_travel_in_parts_of_bounded_size() -> None:
    data = bytes(range(256)) * 2049

    parts = list(convert.tokenizer_files_to_pb([("a", b""), ("b", data)]))

    assert [part.file_name for part in parts] == ["a", "b", "b", "b"]
    assert b"".join(part.data for part in parts) == data
    assert max(len(part.data) for part in parts) == convert.FILE_PART_BYTES


def test_kv_changes_travel_as_joined_hashes() -> None:
    blocks = KvChanges.snapshot([b"a" * 16, b"b" * 16])

    message = convert.kv_events_to_pb(3, TierChanges(blocks, KvChanges.snapshot([b"b" * 16])), TierChanges(blocks))

    assert (message.sequence, message.snapshot) == (3, True)
    assert (message.stored, message.removed) == (b"a" * 16 + b"b" * 16, b"")
    assert (message.checkpoints_stored, message.checkpoints_removed) == (b"b" * 16, b"")
    assert (message.host_snapshot, message.host_stored) == (True, b"a" * 16 + b"b" * 16)


def test_removed_checkpoints_travel_as_joined_hashes() -> None:
    removed = KvChanges(removed=dict.fromkeys([b"a" * 16, b"c" * 16]))

    message = convert.kv_events_to_pb(4, TierChanges(checkpoints=removed), TierChanges())

    assert message == service_pb2.SubscribeKvEventsResponse(sequence=4, checkpoints_removed=b"a" * 16 + b"c" * 16)


@pytest.mark.parametrize("sampling_params", [None, to_pb(core_pb2.SamplingParams, SamplingParams())])
def test_a_pooled_request_without_sampling_params_passes_the_engines_check(
    sampling_params: core_pb2.SamplingParams | None,
) -> None:
    message = request_message(
        pooling_params=core_pb2.PoolingParams(task=core_pb2.POOLING_TASK_EMBED), sampling_params=sampling_params
    )
    limits = ModelLimits(vocab_size=10, lengths=LengthLimits(10), pooling_tasks=frozenset({PoolingTask.EMBED}))

    check_request(convert.request_from_pb(message, now=NOW, vocab_size=VOCAB), limits)
