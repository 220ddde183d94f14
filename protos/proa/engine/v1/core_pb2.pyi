from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PoolingTask(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    POOLING_TASK_UNSPECIFIED: _ClassVar[PoolingTask]
    POOLING_TASK_EMBED: _ClassVar[PoolingTask]
    POOLING_TASK_TOKEN_EMBED: _ClassVar[PoolingTask]
    POOLING_TASK_CLASSIFY: _ClassVar[PoolingTask]
    POOLING_TASK_TOKEN_LOGPROBS: _ClassVar[PoolingTask]
    POOLING_TASK_TOKEN_CLASSIFY: _ClassVar[PoolingTask]
    POOLING_TASK_ALIGN: _ClassVar[PoolingTask]

class EmbeddingType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    EMBEDDING_TYPE_UNSPECIFIED: _ClassVar[EmbeddingType]
    EMBEDDING_TYPE_FLOAT32: _ClassVar[EmbeddingType]
    EMBEDDING_TYPE_FLOAT16: _ClassVar[EmbeddingType]
    EMBEDDING_TYPE_BFLOAT16: _ClassVar[EmbeddingType]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_ABORT: _ClassVar[FinishReason]
    FINISH_REASON_ERROR: _ClassVar[FinishReason]
    FINISH_REASON_COMPLETE: _ClassVar[FinishReason]
    FINISH_REASON_REPETITION: _ClassVar[FinishReason]

class EventType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    EVENT_TYPE_UNSPECIFIED: _ClassVar[EventType]
    EVENT_TYPE_QUEUED: _ClassVar[EventType]
    EVENT_TYPE_SCHEDULED: _ClassVar[EventType]
    EVENT_TYPE_PREEMPTED: _ClassVar[EventType]
    EVENT_TYPE_RESUMED: _ClassVar[EventType]
    EVENT_TYPE_FIRST_TOKEN: _ClassVar[EventType]
    EVENT_TYPE_FINISHED: _ClassVar[EventType]
POOLING_TASK_UNSPECIFIED: PoolingTask
POOLING_TASK_EMBED: PoolingTask
POOLING_TASK_TOKEN_EMBED: PoolingTask
POOLING_TASK_CLASSIFY: PoolingTask
POOLING_TASK_TOKEN_LOGPROBS: PoolingTask
POOLING_TASK_TOKEN_CLASSIFY: PoolingTask
POOLING_TASK_ALIGN: PoolingTask
EMBEDDING_TYPE_UNSPECIFIED: EmbeddingType
EMBEDDING_TYPE_FLOAT32: EmbeddingType
EMBEDDING_TYPE_FLOAT16: EmbeddingType
EMBEDDING_TYPE_BFLOAT16: EmbeddingType
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_ABORT: FinishReason
FINISH_REASON_ERROR: FinishReason
FINISH_REASON_COMPLETE: FinishReason
FINISH_REASON_REPETITION: FinishReason
EVENT_TYPE_UNSPECIFIED: EventType
EVENT_TYPE_QUEUED: EventType
EVENT_TYPE_SCHEDULED: EventType
EVENT_TYPE_PREEMPTED: EventType
EVENT_TYPE_RESUMED: EventType
EVENT_TYPE_FIRST_TOKEN: EventType
EVENT_TYPE_FINISHED: EventType

class SamplingParams(_message.Message):
    __slots__ = ("key", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "allowed_token_ids", "bad_words_token_ids", "max_tokens", "min_tokens", "stop_token_ids", "ignore_eos", "logprobs", "prompt_logprobs", "grammar", "repetition_detection", "logprob_token_ids", "speculative", "begin_suppress_token_ids", "timestamps")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    KEY_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    REPETITION_DETECTION_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SPECULATIVE_FIELD_NUMBER: _ClassVar[int]
    BEGIN_SUPPRESS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TIMESTAMPS_FIELD_NUMBER: _ClassVar[int]
    key: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    allowed_token_ids: _containers.RepeatedScalarFieldContainer[int]
    bad_words_token_ids: _containers.RepeatedCompositeFieldContainer[TokenSequence]
    max_tokens: int
    min_tokens: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    logprobs: int
    prompt_logprobs: int
    grammar: Grammar
    repetition_detection: RepetitionDetection
    logprob_token_ids: _containers.RepeatedScalarFieldContainer[int]
    speculative: bool
    begin_suppress_token_ids: _containers.RepeatedScalarFieldContainer[int]
    timestamps: TimestampRules
    def __init__(self, key: _Optional[int] = ..., temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., allowed_token_ids: _Optional[_Iterable[int]] = ..., bad_words_token_ids: _Optional[_Iterable[_Union[TokenSequence, _Mapping]]] = ..., max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: _Optional[bool] = ..., logprobs: _Optional[int] = ..., prompt_logprobs: _Optional[int] = ..., grammar: _Optional[_Union[Grammar, _Mapping]] = ..., repetition_detection: _Optional[_Union[RepetitionDetection, _Mapping]] = ..., logprob_token_ids: _Optional[_Iterable[int]] = ..., speculative: _Optional[bool] = ..., begin_suppress_token_ids: _Optional[_Iterable[int]] = ..., timestamps: _Optional[_Union[TimestampRules, _Mapping]] = ...) -> None: ...

class TimestampRules(_message.Message):
    __slots__ = ("begin_id", "no_timestamps_id", "end_id", "max_initial_index")
    BEGIN_ID_FIELD_NUMBER: _ClassVar[int]
    NO_TIMESTAMPS_ID_FIELD_NUMBER: _ClassVar[int]
    END_ID_FIELD_NUMBER: _ClassVar[int]
    MAX_INITIAL_INDEX_FIELD_NUMBER: _ClassVar[int]
    begin_id: int
    no_timestamps_id: int
    end_id: int
    max_initial_index: int
    def __init__(self, begin_id: _Optional[int] = ..., no_timestamps_id: _Optional[int] = ..., end_id: _Optional[int] = ..., max_initial_index: _Optional[int] = ...) -> None: ...

class RepetitionDetection(_message.Message):
    __slots__ = ("max_pattern_size", "min_pattern_size", "min_count")
    MAX_PATTERN_SIZE_FIELD_NUMBER: _ClassVar[int]
    MIN_PATTERN_SIZE_FIELD_NUMBER: _ClassVar[int]
    MIN_COUNT_FIELD_NUMBER: _ClassVar[int]
    max_pattern_size: int
    min_pattern_size: int
    min_count: int
    def __init__(self, max_pattern_size: _Optional[int] = ..., min_pattern_size: _Optional[int] = ..., min_count: _Optional[int] = ...) -> None: ...

class Grammar(_message.Message):
    __slots__ = ("text", "start_after", "free_if_first", "repeats")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    START_AFTER_FIELD_NUMBER: _ClassVar[int]
    FREE_IF_FIRST_FIELD_NUMBER: _ClassVar[int]
    REPEATS_FIELD_NUMBER: _ClassVar[int]
    text: str
    start_after: _containers.RepeatedScalarFieldContainer[int]
    free_if_first: _containers.RepeatedScalarFieldContainer[int]
    repeats: bool
    def __init__(self, text: _Optional[str] = ..., start_after: _Optional[_Iterable[int]] = ..., free_if_first: _Optional[_Iterable[int]] = ..., repeats: _Optional[bool] = ...) -> None: ...

class TokenSequence(_message.Message):
    __slots__ = ("token_ids",)
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class PoolingParams(_message.Message):
    __slots__ = ("task", "dimensions", "use_activation", "score_token_ids", "second_segment_start", "expansion_start")
    TASK_FIELD_NUMBER: _ClassVar[int]
    DIMENSIONS_FIELD_NUMBER: _ClassVar[int]
    USE_ACTIVATION_FIELD_NUMBER: _ClassVar[int]
    SCORE_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SECOND_SEGMENT_START_FIELD_NUMBER: _ClassVar[int]
    EXPANSION_START_FIELD_NUMBER: _ClassVar[int]
    task: PoolingTask
    dimensions: int
    use_activation: bool
    score_token_ids: _containers.RepeatedScalarFieldContainer[int]
    second_segment_start: int
    expansion_start: int
    def __init__(self, task: _Optional[_Union[PoolingTask, str]] = ..., dimensions: _Optional[int] = ..., use_activation: _Optional[bool] = ..., score_token_ids: _Optional[_Iterable[int]] = ..., second_segment_start: _Optional[int] = ..., expansion_start: _Optional[int] = ...) -> None: ...

class EngineCoreRequest(_message.Message):
    __slots__ = ("request_id", "prompt_token_ids", "sampling_params", "priority", "cache_salt", "trace_headers", "resumed_token_ids", "arrival_time", "pooling_params", "lora_name", "lora_digest", "images", "prefill_only", "kv_source", "prompt_embeds", "tenant", "retain", "released", "audios")
    class TraceHeadersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_PARAMS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    TRACE_HEADERS_FIELD_NUMBER: _ClassVar[int]
    RESUMED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    ARRIVAL_TIME_FIELD_NUMBER: _ClassVar[int]
    POOLING_PARAMS_FIELD_NUMBER: _ClassVar[int]
    LORA_NAME_FIELD_NUMBER: _ClassVar[int]
    LORA_DIGEST_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    PREFILL_ONLY_FIELD_NUMBER: _ClassVar[int]
    KV_SOURCE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_EMBEDS_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    RETAIN_FIELD_NUMBER: _ClassVar[int]
    RELEASED_FIELD_NUMBER: _ClassVar[int]
    AUDIOS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    prompt_token_ids: bytes
    sampling_params: SamplingParams
    priority: int
    cache_salt: str
    trace_headers: _containers.ScalarMap[str, str]
    resumed_token_ids: bytes
    arrival_time: float
    pooling_params: PoolingParams
    lora_name: str
    lora_digest: str
    images: _containers.RepeatedCompositeFieldContainer[Image]
    prefill_only: bool
    kv_source: KvSource
    prompt_embeds: _containers.RepeatedCompositeFieldContainer[PromptEmbeds]
    tenant: str
    retain: bool
    released: bytes
    audios: _containers.RepeatedCompositeFieldContainer[Audio]
    def __init__(self, request_id: _Optional[str] = ..., prompt_token_ids: _Optional[bytes] = ..., sampling_params: _Optional[_Union[SamplingParams, _Mapping]] = ..., priority: _Optional[int] = ..., cache_salt: _Optional[str] = ..., trace_headers: _Optional[_Mapping[str, str]] = ..., resumed_token_ids: _Optional[bytes] = ..., arrival_time: _Optional[float] = ..., pooling_params: _Optional[_Union[PoolingParams, _Mapping]] = ..., lora_name: _Optional[str] = ..., lora_digest: _Optional[str] = ..., images: _Optional[_Iterable[_Union[Image, _Mapping]]] = ..., prefill_only: _Optional[bool] = ..., kv_source: _Optional[_Union[KvSource, _Mapping]] = ..., prompt_embeds: _Optional[_Iterable[_Union[PromptEmbeds, _Mapping]]] = ..., tenant: _Optional[str] = ..., retain: _Optional[bool] = ..., released: _Optional[bytes] = ..., audios: _Optional[_Iterable[_Union[Audio, _Mapping]]] = ...) -> None: ...

class KvSource(_message.Message):
    __slots__ = ("addresses", "num_blocks", "wait_ms")
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    addresses: _containers.RepeatedScalarFieldContainer[str]
    num_blocks: int
    wait_ms: int
    def __init__(self, addresses: _Optional[_Iterable[str]] = ..., num_blocks: _Optional[int] = ..., wait_ms: _Optional[int] = ...) -> None: ...

class Image(_message.Message):
    __slots__ = ("hash", "offset", "num_tokens", "height", "width", "pixels")
    HASH_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HEIGHT_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    PIXELS_FIELD_NUMBER: _ClassVar[int]
    hash: bytes
    offset: int
    num_tokens: int
    height: int
    width: int
    pixels: bytes
    def __init__(self, hash: _Optional[bytes] = ..., offset: _Optional[int] = ..., num_tokens: _Optional[int] = ..., height: _Optional[int] = ..., width: _Optional[int] = ..., pixels: _Optional[bytes] = ...) -> None: ...

class Audio(_message.Message):
    __slots__ = ("hash", "offset", "num_tokens", "num_samples", "samples")
    HASH_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    hash: bytes
    offset: int
    num_tokens: int
    num_samples: int
    samples: bytes
    def __init__(self, hash: _Optional[bytes] = ..., offset: _Optional[int] = ..., num_tokens: _Optional[int] = ..., num_samples: _Optional[int] = ..., samples: _Optional[bytes] = ...) -> None: ...

class PromptEmbeds(_message.Message):
    __slots__ = ("offset", "num_tokens", "type", "values")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TYPE_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    offset: int
    num_tokens: int
    type: EmbeddingType
    values: bytes
    def __init__(self, offset: _Optional[int] = ..., num_tokens: _Optional[int] = ..., type: _Optional[_Union[EmbeddingType, str]] = ..., values: _Optional[bytes] = ...) -> None: ...

class Event(_message.Message):
    __slots__ = ("type", "timestamp")
    TYPE_FIELD_NUMBER: _ClassVar[int]
    TIMESTAMP_FIELD_NUMBER: _ClassVar[int]
    type: EventType
    timestamp: float
    def __init__(self, type: _Optional[_Union[EventType, str]] = ..., timestamp: _Optional[float] = ...) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("token_id", "logprob", "rank", "top_token_ids", "top_logprobs")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    rank: int
    top_token_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ..., rank: _Optional[int] = ..., top_token_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class EngineCoreOutput(_message.Message):
    __slots__ = ("request_id", "handle", "new_token_ids", "logprobs", "prompt_logprobs", "finish_reason", "stop_reason", "num_prompt_tokens", "num_output_tokens", "num_cached_tokens", "events", "error", "pooled", "num_pooled_rows", "fetch")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    NEW_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_REASON_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    POOLED_FIELD_NUMBER: _ClassVar[int]
    NUM_POOLED_ROWS_FIELD_NUMBER: _ClassVar[int]
    FETCH_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    handle: int
    new_token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    finish_reason: FinishReason
    stop_reason: int
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    events: _containers.RepeatedCompositeFieldContainer[Event]
    error: str
    pooled: bytes
    num_pooled_rows: int
    fetch: KvFetch
    def __init__(self, request_id: _Optional[str] = ..., handle: _Optional[int] = ..., new_token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ..., stop_reason: _Optional[int] = ..., num_prompt_tokens: _Optional[int] = ..., num_output_tokens: _Optional[int] = ..., num_cached_tokens: _Optional[int] = ..., events: _Optional[_Iterable[_Union[Event, _Mapping]]] = ..., error: _Optional[str] = ..., pooled: _Optional[bytes] = ..., num_pooled_rows: _Optional[int] = ..., fetch: _Optional[_Union[KvFetch, _Mapping]] = ...) -> None: ...

class KvFetch(_message.Message):
    __slots__ = ("started", "ended", "num_tokens", "num_bytes", "error")
    STARTED_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    started: float
    ended: float
    num_tokens: int
    num_bytes: int
    error: str
    def __init__(self, started: _Optional[float] = ..., ended: _Optional[float] = ..., num_tokens: _Optional[int] = ..., num_bytes: _Optional[int] = ..., error: _Optional[str] = ...) -> None: ...

class SchedulerStats(_message.Message):
    __slots__ = ("num_running_reqs", "num_waiting_reqs", "kv_cache_usage", "num_waiting_tokens", "prefix_cache_queries", "prefix_cache_hits", "num_preemptions", "last_step_age", "sleep_level", "num_fetching_reqs", "host_cache_usage", "prefill_tokens_per_second", "load_bytes_per_second", "num_retained_blocks", "num_claimed_elsewhere", "longest_wait_elsewhere")
    NUM_RUNNING_REQS_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_REQS_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_USAGE_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_CACHE_QUERIES_FIELD_NUMBER: _ClassVar[int]
    PREFIX_CACHE_HITS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    LAST_STEP_AGE_FIELD_NUMBER: _ClassVar[int]
    SLEEP_LEVEL_FIELD_NUMBER: _ClassVar[int]
    NUM_FETCHING_REQS_FIELD_NUMBER: _ClassVar[int]
    HOST_CACHE_USAGE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    LOAD_BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    NUM_RETAINED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_CLAIMED_ELSEWHERE_FIELD_NUMBER: _ClassVar[int]
    LONGEST_WAIT_ELSEWHERE_FIELD_NUMBER: _ClassVar[int]
    num_running_reqs: int
    num_waiting_reqs: int
    kv_cache_usage: float
    num_waiting_tokens: int
    prefix_cache_queries: int
    prefix_cache_hits: int
    num_preemptions: int
    last_step_age: float
    sleep_level: int
    num_fetching_reqs: int
    host_cache_usage: float
    prefill_tokens_per_second: float
    load_bytes_per_second: float
    num_retained_blocks: int
    num_claimed_elsewhere: int
    longest_wait_elsewhere: float
    def __init__(self, num_running_reqs: _Optional[int] = ..., num_waiting_reqs: _Optional[int] = ..., kv_cache_usage: _Optional[float] = ..., num_waiting_tokens: _Optional[int] = ..., prefix_cache_queries: _Optional[int] = ..., prefix_cache_hits: _Optional[int] = ..., num_preemptions: _Optional[int] = ..., last_step_age: _Optional[float] = ..., sleep_level: _Optional[int] = ..., num_fetching_reqs: _Optional[int] = ..., host_cache_usage: _Optional[float] = ..., prefill_tokens_per_second: _Optional[float] = ..., load_bytes_per_second: _Optional[float] = ..., num_retained_blocks: _Optional[int] = ..., num_claimed_elsewhere: _Optional[int] = ..., longest_wait_elsewhere: _Optional[float] = ...) -> None: ...

class EngineCoreOutputs(_message.Message):
    __slots__ = ("outputs", "plain_handles", "plain_token_ids", "stats", "timestamp", "step")
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    PLAIN_HANDLES_FIELD_NUMBER: _ClassVar[int]
    PLAIN_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    STATS_FIELD_NUMBER: _ClassVar[int]
    TIMESTAMP_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    outputs: _containers.RepeatedCompositeFieldContainer[EngineCoreOutput]
    plain_handles: bytes
    plain_token_ids: bytes
    stats: SchedulerStats
    timestamp: float
    step: int
    def __init__(self, outputs: _Optional[_Iterable[_Union[EngineCoreOutput, _Mapping]]] = ..., plain_handles: _Optional[bytes] = ..., plain_token_ids: _Optional[bytes] = ..., stats: _Optional[_Union[SchedulerStats, _Mapping]] = ..., timestamp: _Optional[float] = ..., step: _Optional[int] = ...) -> None: ...
