"""The contract's dataclasses and their messages: same fields, and nothing is lost or made up on the way."""

from array import array
from dataclasses import MISSING, Field, fields
from typing import Any

import pytest

from proa.contract import (
    AsrPrompts,
    Audio,
    AudioInput,
    AudioLayer,
    CheckpointRule,
    Draining,
    EmbeddingType,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    Event,
    EventType,
    FinishReason,
    Grammar,
    Hello,
    Image,
    ImageInput,
    KvEvents,
    KvFetch,
    KvSource,
    KvTransfer,
    LoadedLoras,
    Lora,
    PoolingParams,
    PoolingTask,
    PromptEmbeds,
    Rejected,
    RepetitionDetectionParams,
    Role,
    SamplingParams,
    SchedulerStats,
    TimestampRules,
    TokenLogprobs,
    WhisperPrompts,
    extra_keys,
)
from proa.contract.pb import from_pb, to_pb
from proa.engine.v1 import core_pb2, service_pb2
from support.model_info import model_info
from support.sampling_params import EXAMPLES

PARAMS = SamplingParams(
    key=2**64 - 1,
    **EXAMPLES,
    logit_bias={3: 0.5},
    allowed_token_ids=(1, 2),
    bad_words_token_ids=((4, 5), (6,)),
    max_tokens=9,
    min_tokens=3,
    stop_token_ids=(6,),
    ignore_eos=True,
    logprobs=2,
    logprob_token_ids=(9, 3),
    prompt_logprobs=1,
    grammar=Grammar(text='start: "a"', start_after=(5, 6), free_if_first=(4,), repeats=True),
    repetition_detection=RepetitionDetectionParams(max_pattern_size=4, min_pattern_size=2, min_count=3),
    speculative=False,
)
OUTPUT = EngineCoreOutput(
    request_id="r",
    handle=7,
    new_token_ids=[4, 5],
    logprobs=[TokenLogprobs(4, -0.5, 1, [4, 9], [-0.5, -1.0]), TokenLogprobs(0, -2.0, 3, [], [])],
    prompt_logprobs=[TokenLogprobs(2, 0.0, 2, [], [])],
    finish_reason=FinishReason.STOP,
    stop_reason=0,
    num_prompt_tokens=3,
    num_output_tokens=2,
    num_cached_tokens=0,
    events=[Event(EventType.QUEUED, 1.5), Event(EventType.FINISHED, 2.5)],
    error="sentence",
    pooled=b"\x00\x00\x80\x3f",
    num_pooled_rows=1,
    fetch=KvFetch(1.5, 2.5, 64, 4096, "the source was reset"),
)
STATS = SchedulerStats(
    num_running_reqs=1,
    num_waiting_reqs=2,
    kv_cache_usage=0.5,
    num_waiting_tokens=4,
    prefix_cache_queries=5,
    prefix_cache_hits=6,
    num_preemptions=7,
    last_step_age=0.25,
    sleep_level=2,
    num_fetching_reqs=1,
    host_cache_usage=0.25,
    prefill_tokens_per_second=1024.0,
    load_bytes_per_second=4096.0,
    num_retained_blocks=9,
    num_claimed_elsewhere=8,
    longest_wait_elsewhere=1.5,
)
IMAGE = Image(hash=b"0123456789abcdef", offset=3, num_tokens=1, height=32, width=32, pixels=bytes(3072))
IMAGE_INPUT = ImageInput(
    token_id=7,
    token="<pad>",
    placeholder="<image>",
    prefix="<",
    suffix=">",
    unit=32,
    row_end_id=9,
    row_end="<row>",
    side=64,
    max_side=128,
    fills=True,
    min_pixels=1024,
    max_pixels=4096,
    resample=3,
)
AUDIO = Audio(hash=b"0123456789abcdef", offset=4, num_tokens=1, num_samples=2, samples=bytes(8))
WHISPER = WhisperPrompts(
    decoder_start_token_id=50257,
    languages={"en": 50258, "haw": 50259},
    tasks={"transcribe": 50260},
    no_timestamps_token_id=50261,
    timestamp_begin_id=50262,
    prev_sot_token_id=50263,
    no_speech_token_id=50264,
    suppress_tokens=(1, 2),
    begin_suppress_tokens=(220,),
    max_initial_timestamp_index=50,
    max_target_positions=448,
    is_multilingual=True,
)
ASR = AsrPrompts(marker_id=9, marker="<asr>", languages={"en": "English"})
AUDIO_INPUT = AudioInput(
    sampling_rate=16000,
    hop=160,
    pad_to=320,
    min_samples=8000,
    chunk=3000,
    layers=(AudioLayer(kernel=3, stride=2, padding=1),),
    max_samples=480000,
    cross_attention=True,
    token_id=8,
    token="<audio>",
    placeholder="<|audio|>",
    prefix="<",
    suffix=">",
    whisper=WHISPER,
    asr=ASR,
)
TIMESTAMPS = TimestampRules(begin_id=50262, no_timestamps_id=50261, end_id=50256, max_initial_index=50)
TRANSCRIPTION = SamplingParams(begin_suppress_token_ids=(220, 50256), timestamps=TIMESTAMPS)
INFO = model_info(
    model_name="name",
    model="folder",
    revision="main",
    tokenizer_digest="00ff",
    eos_token_ids=(0, 2),
    engine_version="0.1",
    max_num_batched_tokens=65,
    grammars=True,
    model_type="llama",
    checkpoint_rule=CheckpointRule(interval=512, min_junction=256),
    pooling_tasks=(PoolingTask.EMBED, PoolingTask.CLASSIFY),
    pooling_only=True,
    embedding_size=32,
    labels=("no", "yes"),
    max_loras=2,
    images=IMAGE_INPUT,
    audios=AUDIO_INPUT,
    max_embed_len=512,
    num_host_blocks=64,
    kv_transfer=KvTransfer(fingerprint=b"\x80\xff", ports=(4711, 4712), block_bytes=4096),
    role=Role.DECODE,
    prompt_embeds_size=32,
    aliases=("other",),
    session_claims=True,
)
LORAS = LoadedLoras(loras=(Lora(name="sql", path="/adapters/sql", digest="ab"),))
EMBED = PoolingParams(
    task=PoolingTask.EMBED, dimensions=16, use_activation=False, second_segment_start=2, expansion_start=3
)
TOKENS = PoolingParams(task=PoolingTask.TOKEN_LOGPROBS, score_token_ids=(3, 4))
REQUEST = EngineCoreRequest(
    request_id="r",
    prompt_token_ids=[1, 300],
    sampling_params=PARAMS,
    priority=-3,
    cache_salt="salt",
    tenant="key 1",
    retain=True,
    released=[b"h" * 16, b"i" * 16],
    trace_headers={"traceparent": "00-1"},
    resumed_token_ids=[7],
    arrival_time=12.5,
    pooling_params=EMBED,
    lora_name="sql",
    lora_digest="ab",
    images=(IMAGE,),
    audios=(AUDIO,),
    prefill_only=True,
    kv_source=KvSource(addresses=("a:1", "b:2"), num_blocks=3, wait_ms=500),
    prompt_embeds=(PromptEmbeds(offset=1, num_tokens=1, type=EmbeddingType.BFLOAT16, values=b"\xff\x00"),),
)
OUTPUTS = EngineCoreOutputs(
    outputs=[OUTPUT], plain_handles=[1, 2], plain_token_ids=[300, 4], stats=STATS, timestamp=9.0, step=4
)
KV_EVENTS = KvEvents(
    sequence=2,
    snapshot=True,
    stored=[b"a" * 16, b"b" * 16],
    removed=[b"c" * 16],
    checkpoints_stored=[b"b" * 16],
    checkpoints_removed=[b"d" * 16, b"e" * 16],
    host_snapshot=True,
    host_stored=[b"f" * 16],
    host_removed=[b"g" * 16, b"h" * 16],
    host_checkpoints_stored=[b"i" * 16],
    host_checkpoints_removed=[b"j" * 16],
)

# A value of each class, and its message's class.
PAIRS: list[tuple[object, type[Any]]] = [
    (PARAMS, core_pb2.SamplingParams),
    (PARAMS.grammar, core_pb2.Grammar),
    (EMBED, core_pb2.PoolingParams),
    (TOKENS, core_pb2.PoolingParams),
    (REQUEST, core_pb2.EngineCoreRequest),
    (REQUEST.kv_source, core_pb2.KvSource),
    (REQUEST.prompt_embeds[0], core_pb2.PromptEmbeds),
    (OUTPUT.events[0], core_pb2.Event),
    (OUTPUT.logprobs[0], core_pb2.TokenLogprobs),
    (OUTPUT, core_pb2.EngineCoreOutput),
    (OUTPUT.fetch, core_pb2.KvFetch),
    (STATS, core_pb2.SchedulerStats),
    (OUTPUTS, core_pb2.EngineCoreOutputs),
    (INFO.checkpoint_rule, service_pb2.CheckpointRule),
    (INFO.kv_transfer, service_pb2.KvTransfer),
    (INFO, service_pb2.GetModelInfoResponse),
    (LORAS.loras[0], service_pb2.Lora),
    (LORAS, service_pb2.LoadedLoras),
    (Hello(instance_id="i", model=INFO, stats=STATS, loras=LORAS), service_pb2.Hello),
    (
        Rejected(
            handle=1,
            code=9,
            message="gone",
            retryable=True,
            missing_images=[IMAGE.hash],
            missing_audios=[AUDIO.hash, b"h" * 16],
        ),
        service_pb2.Rejected,
    ),
    (IMAGE, core_pb2.Image),
    (IMAGE_INPUT, service_pb2.ImageInput),
    (AUDIO, core_pb2.Audio),
    (AUDIO_INPUT, service_pb2.AudioInput),
    (AUDIO_INPUT.layers[0], service_pb2.AudioLayer),
    (WHISPER, service_pb2.WhisperPrompts),
    (ASR, service_pb2.AsrPrompts),
    (TIMESTAMPS, core_pb2.TimestampRules),
    (TRANSCRIPTION, core_pb2.SamplingParams),
    (Draining(), service_pb2.Draining),
    (KV_EVENTS, service_pb2.SubscribeKvEventsResponse),
]
NAMES = [message.__name__ for _, message in PAIRS]


def default_of(field: Field[Any]) -> object:
    return field.default if field.default_factory is MISSING else field.default_factory()


def wire_fields(value: Any) -> list[Any]:
    return [field for field in fields(value) if field.metadata.get("wire", True)]


@pytest.mark.parametrize(("value", "message_class"), PAIRS, ids=NAMES)
def test_fields_have_the_names_of_the_message(value: object, message_class: Any) -> None:
    assert {field.name for field in wire_fields(value)} == set(message_class.DESCRIPTOR.fields_by_name)


def test_every_field_has_a_value_that_is_not_its_default() -> None:
    """Of the request for an embedding and the one for log probabilities, one has it."""
    unset = [
        {each.name for each in wire_fields(value) if getattr(value, each.name) == default_of(each)}
        for value, _ in PAIRS
    ]
    for (value, _), names in zip(PAIRS, unset, strict=True):
        same = [each for each, (other, _) in zip(unset, PAIRS, strict=True) if type(other) is type(value)]
        assert not names.intersection(*same), type(value).__name__


@pytest.mark.parametrize(("value", "message_class"), PAIRS, ids=NAMES)
def test_every_field_arrives(value: object, message_class: Any) -> None:
    message = message_class.FromString(to_pb(message_class, value).SerializeToString())

    assert from_pb(type(value), message) == value


@pytest.mark.parametrize(("value", "message_class"), PAIRS, ids=NAMES)
def test_defaults_are_zero_where_a_message_cannot_tell_unset_from_zero(value: object, message_class: Any) -> None:
    for field in wire_fields(value):
        described = message_class.DESCRIPTOR.fields_by_name[field.name]
        if not described.has_presence and field.default not in (MISSING, None):
            assert not field.default, field.name


@pytest.mark.parametrize(
    ("name", "number"),
    [("FinishReason", member) for member in FinishReason] + [("EventType", member) for member in EventType],
)
def test_enums_have_the_numbers_of_the_messages(name: str, number: FinishReason | EventType) -> None:
    members = core_pb2.DESCRIPTOR.enum_types_by_name[name].values_by_number

    assert len(members) == len(type(number)) + 1  # and UNSPECIFIED
    assert members[number].name.endswith(f"_{number.name}")


def test_pooled_request_without_a_task_is_refused() -> None:
    with pytest.raises(ValueError, match="task must be one of EMBED"):
        from_pb(PoolingParams, core_pb2.PoolingParams())


@pytest.mark.parametrize(
    ("refused", "fields"),
    [
        ("dimensions", {"task": PoolingTask.CLASSIFY, "dimensions": 4}),
        ("dimensions", {"task": PoolingTask.EMBED, "dimensions": 0}),
        ("score_token_ids", {"task": PoolingTask.EMBED, "score_token_ids": (1,)}),
        ("score_token_ids", {"task": PoolingTask.TOKEN_LOGPROBS}),
        ("use_activation", {"task": PoolingTask.TOKEN_LOGPROBS, "score_token_ids": (1,), "use_activation": True}),
    ],
)
def test_pooling_params_of_another_task_are_refused(refused: str, fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=refused):
        PoolingParams(**fields)


def test_salt_and_adapter_never_give_the_same_keys() -> None:
    keys = {extra_keys(*key) for key in (("", "", ""), ("a", "", ""), ("", "a", "d"), ("", "a", "e"), ("a", "b", "d"))}
    assert len(keys) == 5


def test_unset_sampling_params_get_the_documented_defaults() -> None:
    assert from_pb(SamplingParams, core_pb2.SamplingParams()) == SamplingParams(max_tokens=None)


def test_zero_is_not_unset() -> None:
    params = from_pb(SamplingParams, core_pb2.SamplingParams(temperature=0, key=0, logprobs=0))

    assert (params.temperature, params.key, params.logprobs, params.prompt_logprobs) == (0.0, 0, 0, None)


def test_unset_fields_of_an_output_are_none() -> None:
    output = from_pb(EngineCoreOutput, core_pb2.EngineCoreOutput(handle=1))

    assert output == EngineCoreOutput(handle=1, new_token_ids=[], logprobs=[], prompt_logprobs=[], events=[])
    assert from_pb(EngineCoreOutputs, core_pb2.EngineCoreOutputs()).stats is None


def test_none_is_not_sent() -> None:
    message = to_pb(core_pb2.EngineCoreOutput, EngineCoreOutput(handle=7))

    assert message.SerializeToString() == core_pb2.EngineCoreOutput(handle=7).SerializeToString()
    assert to_pb(core_pb2.EngineCoreOutput, OUTPUT).HasField("num_cached_tokens")


def test_request_without_sampling_params_gets_the_defaults() -> None:
    message = core_pb2.EngineCoreRequest(request_id="r")

    assert from_pb(EngineCoreRequest, message).sampling_params == SamplingParams(max_tokens=None)


def test_token_ids_travel_as_little_endian_columns() -> None:
    outputs = EngineCoreOutputs(plain_handles=array("I", [1, 2]), plain_token_ids=[300, 4])

    message = to_pb(core_pb2.EngineCoreOutputs, outputs)

    assert message.plain_handles == b"\x01\0\0\0\x02\0\0\0"
    assert message.plain_token_ids == b"\x2c\x01\0\0\x04\0\0\0"


@pytest.mark.parametrize("name", ["prompt_token_ids", "resumed_token_ids"])
def test_malformed_column_is_named(name: str) -> None:
    fields: dict[str, Any] = {name: b"12345"}

    with pytest.raises(ValueError, match=f"{name} must be little-endian uint32, so a multiple of 4 bytes, not 5"):
        from_pb(EngineCoreRequest, core_pb2.EngineCoreRequest(**fields))


def test_values_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match="top_p must be greater than 0"):
        from_pb(SamplingParams, core_pb2.SamplingParams(top_p=0))


def test_enum_numbers_of_a_newer_peer_are_kept() -> None:
    message = core_pb2.EngineCoreOutput()
    message.ParseFromString(b"\x30\x63")  # finish_reason: 99

    assert from_pb(EngineCoreOutput, message).finish_reason == 99


def test_token_ids_are_kept_once_in_the_order_of_their_first_mention() -> None:
    params = SamplingParams(
        allowed_token_ids=(7, 3, 7) * 100, stop_token_ids=(2, 2), bad_words_token_ids=((1, 1), (1,), (1, 1))
    )
    assert (params.allowed_token_ids, params.stop_token_ids) == ((7, 3), (2,))
    assert params.bad_words_token_ids == ((1, 1), (1,))
