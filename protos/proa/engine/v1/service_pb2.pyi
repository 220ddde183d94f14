from proa.engine.v1 import core_pb2 as _core_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_PREFILL: _ClassVar[Role]
    ROLE_DECODE: _ClassVar[Role]
ROLE_UNSPECIFIED: Role
ROLE_PREFILL: Role
ROLE_DECODE: Role

class GenerateRequest(_message.Message):
    __slots__ = ("request",)
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    request: _core_pb2.EngineCoreRequest
    def __init__(self, request: _Optional[_Union[_core_pb2.EngineCoreRequest, _Mapping]] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("output",)
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    output: _core_pb2.EngineCoreOutput
    def __init__(self, output: _Optional[_Union[_core_pb2.EngineCoreOutput, _Mapping]] = ...) -> None: ...

class SessionRequest(_message.Message):
    __slots__ = ("open", "add", "abort", "claim")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    ADD_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    CLAIM_FIELD_NUMBER: _ClassVar[int]
    open: OpenSession
    add: AddRequest
    abort: AbortHandles
    claim: SessionClaim
    def __init__(self, open: _Optional[_Union[OpenSession, _Mapping]] = ..., add: _Optional[_Union[AddRequest, _Mapping]] = ..., abort: _Optional[_Union[AbortHandles, _Mapping]] = ..., claim: _Optional[_Union[SessionClaim, _Mapping]] = ...) -> None: ...

class SessionClaim(_message.Message):
    __slots__ = ("num_blocks", "longest_wait")
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LONGEST_WAIT_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    longest_wait: float
    def __init__(self, num_blocks: _Optional[int] = ..., longest_wait: _Optional[float] = ...) -> None: ...

class OpenSession(_message.Message):
    __slots__ = ("client_id",)
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    client_id: str
    def __init__(self, client_id: _Optional[str] = ...) -> None: ...

class AddRequest(_message.Message):
    __slots__ = ("handle", "request")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    handle: int
    request: _core_pb2.EngineCoreRequest
    def __init__(self, handle: _Optional[int] = ..., request: _Optional[_Union[_core_pb2.EngineCoreRequest, _Mapping]] = ...) -> None: ...

class AbortHandles(_message.Message):
    __slots__ = ("handles",)
    HANDLES_FIELD_NUMBER: _ClassVar[int]
    handles: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, handles: _Optional[_Iterable[int]] = ...) -> None: ...

class SessionResponse(_message.Message):
    __slots__ = ("hello", "outputs", "rejected", "draining", "loras")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    REJECTED_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    LORAS_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    outputs: _core_pb2.EngineCoreOutputs
    rejected: Rejected
    draining: Draining
    loras: LoadedLoras
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., outputs: _Optional[_Union[_core_pb2.EngineCoreOutputs, _Mapping]] = ..., rejected: _Optional[_Union[Rejected, _Mapping]] = ..., draining: _Optional[_Union[Draining, _Mapping]] = ..., loras: _Optional[_Union[LoadedLoras, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("instance_id", "model", "stats", "loras")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    STATS_FIELD_NUMBER: _ClassVar[int]
    LORAS_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    model: GetModelInfoResponse
    stats: _core_pb2.SchedulerStats
    loras: LoadedLoras
    def __init__(self, instance_id: _Optional[str] = ..., model: _Optional[_Union[GetModelInfoResponse, _Mapping]] = ..., stats: _Optional[_Union[_core_pb2.SchedulerStats, _Mapping]] = ..., loras: _Optional[_Union[LoadedLoras, _Mapping]] = ...) -> None: ...

class LoadedLoras(_message.Message):
    __slots__ = ("loras",)
    LORAS_FIELD_NUMBER: _ClassVar[int]
    loras: _containers.RepeatedCompositeFieldContainer[Lora]
    def __init__(self, loras: _Optional[_Iterable[_Union[Lora, _Mapping]]] = ...) -> None: ...

class Lora(_message.Message):
    __slots__ = ("name", "path", "digest")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    name: str
    path: str
    digest: str
    def __init__(self, name: _Optional[str] = ..., path: _Optional[str] = ..., digest: _Optional[str] = ...) -> None: ...

class Rejected(_message.Message):
    __slots__ = ("handle", "code", "message", "retryable", "missing_images", "missing_audios")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETRYABLE_FIELD_NUMBER: _ClassVar[int]
    MISSING_IMAGES_FIELD_NUMBER: _ClassVar[int]
    MISSING_AUDIOS_FIELD_NUMBER: _ClassVar[int]
    handle: int
    code: int
    message: str
    retryable: bool
    missing_images: bytes
    missing_audios: bytes
    def __init__(self, handle: _Optional[int] = ..., code: _Optional[int] = ..., message: _Optional[str] = ..., retryable: _Optional[bool] = ..., missing_images: _Optional[bytes] = ..., missing_audios: _Optional[bytes] = ...) -> None: ...

class Draining(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("request_ids",)
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    request_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, request_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class AbortResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetModelInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetModelInfoResponse(_message.Message):
    __slots__ = ("model_name", "model", "revision", "max_model_len", "vocab_size", "block_size", "num_gpu_blocks", "block_hash_version", "tokenizer_digest", "eos_token_ids", "max_num_seqs", "max_logprobs", "max_waiting_requests", "engine_version", "max_num_batched_tokens", "prefix_caching", "grammars", "model_type", "checkpoint_rule", "pooling_tasks", "pooling_only", "embedding_size", "labels", "max_loras", "images", "max_embed_len", "num_host_blocks", "kv_transfer", "role", "prompt_embeds_size", "aliases", "audios", "session_claims")
    MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_GPU_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASH_VERSION_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    MAX_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    MAX_WAITING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    ENGINE_VERSION_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_BATCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_CACHING_FIELD_NUMBER: _ClassVar[int]
    GRAMMARS_FIELD_NUMBER: _ClassVar[int]
    MODEL_TYPE_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_RULE_FIELD_NUMBER: _ClassVar[int]
    POOLING_TASKS_FIELD_NUMBER: _ClassVar[int]
    POOLING_ONLY_FIELD_NUMBER: _ClassVar[int]
    EMBEDDING_SIZE_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    MAX_LORAS_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    MAX_EMBED_LEN_FIELD_NUMBER: _ClassVar[int]
    NUM_HOST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    KV_TRANSFER_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_EMBEDS_SIZE_FIELD_NUMBER: _ClassVar[int]
    ALIASES_FIELD_NUMBER: _ClassVar[int]
    AUDIOS_FIELD_NUMBER: _ClassVar[int]
    SESSION_CLAIMS_FIELD_NUMBER: _ClassVar[int]
    model_name: str
    model: str
    revision: str
    max_model_len: int
    vocab_size: int
    block_size: int
    num_gpu_blocks: int
    block_hash_version: int
    tokenizer_digest: str
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    max_num_seqs: int
    max_logprobs: int
    max_waiting_requests: int
    engine_version: str
    max_num_batched_tokens: int
    prefix_caching: bool
    grammars: bool
    model_type: str
    checkpoint_rule: CheckpointRule
    pooling_tasks: _containers.RepeatedScalarFieldContainer[_core_pb2.PoolingTask]
    pooling_only: bool
    embedding_size: int
    labels: _containers.RepeatedScalarFieldContainer[str]
    max_loras: int
    images: ImageInput
    max_embed_len: int
    num_host_blocks: int
    kv_transfer: KvTransfer
    role: Role
    prompt_embeds_size: int
    aliases: _containers.RepeatedScalarFieldContainer[str]
    audios: AudioInput
    session_claims: bool
    def __init__(self, model_name: _Optional[str] = ..., model: _Optional[str] = ..., revision: _Optional[str] = ..., max_model_len: _Optional[int] = ..., vocab_size: _Optional[int] = ..., block_size: _Optional[int] = ..., num_gpu_blocks: _Optional[int] = ..., block_hash_version: _Optional[int] = ..., tokenizer_digest: _Optional[str] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., max_num_seqs: _Optional[int] = ..., max_logprobs: _Optional[int] = ..., max_waiting_requests: _Optional[int] = ..., engine_version: _Optional[str] = ..., max_num_batched_tokens: _Optional[int] = ..., prefix_caching: _Optional[bool] = ..., grammars: _Optional[bool] = ..., model_type: _Optional[str] = ..., checkpoint_rule: _Optional[_Union[CheckpointRule, _Mapping]] = ..., pooling_tasks: _Optional[_Iterable[_Union[_core_pb2.PoolingTask, str]]] = ..., pooling_only: _Optional[bool] = ..., embedding_size: _Optional[int] = ..., labels: _Optional[_Iterable[str]] = ..., max_loras: _Optional[int] = ..., images: _Optional[_Union[ImageInput, _Mapping]] = ..., max_embed_len: _Optional[int] = ..., num_host_blocks: _Optional[int] = ..., kv_transfer: _Optional[_Union[KvTransfer, _Mapping]] = ..., role: _Optional[_Union[Role, str]] = ..., prompt_embeds_size: _Optional[int] = ..., aliases: _Optional[_Iterable[str]] = ..., audios: _Optional[_Union[AudioInput, _Mapping]] = ..., session_claims: _Optional[bool] = ...) -> None: ...

class KvTransfer(_message.Message):
    __slots__ = ("fingerprint", "ports", "block_bytes")
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    PORTS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    fingerprint: bytes
    ports: _containers.RepeatedScalarFieldContainer[int]
    block_bytes: int
    def __init__(self, fingerprint: _Optional[bytes] = ..., ports: _Optional[_Iterable[int]] = ..., block_bytes: _Optional[int] = ...) -> None: ...

class ImageInput(_message.Message):
    __slots__ = ("token_id", "token", "placeholder", "prefix", "suffix", "unit", "side", "min_pixels", "max_pixels", "resample", "row_end_id", "row_end", "max_side", "fills")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    PLACEHOLDER_FIELD_NUMBER: _ClassVar[int]
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    SUFFIX_FIELD_NUMBER: _ClassVar[int]
    UNIT_FIELD_NUMBER: _ClassVar[int]
    SIDE_FIELD_NUMBER: _ClassVar[int]
    MIN_PIXELS_FIELD_NUMBER: _ClassVar[int]
    MAX_PIXELS_FIELD_NUMBER: _ClassVar[int]
    RESAMPLE_FIELD_NUMBER: _ClassVar[int]
    ROW_END_ID_FIELD_NUMBER: _ClassVar[int]
    ROW_END_FIELD_NUMBER: _ClassVar[int]
    MAX_SIDE_FIELD_NUMBER: _ClassVar[int]
    FILLS_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    token: str
    placeholder: str
    prefix: str
    suffix: str
    unit: int
    side: int
    min_pixels: int
    max_pixels: int
    resample: int
    row_end_id: int
    row_end: str
    max_side: int
    fills: bool
    def __init__(self, token_id: _Optional[int] = ..., token: _Optional[str] = ..., placeholder: _Optional[str] = ..., prefix: _Optional[str] = ..., suffix: _Optional[str] = ..., unit: _Optional[int] = ..., side: _Optional[int] = ..., min_pixels: _Optional[int] = ..., max_pixels: _Optional[int] = ..., resample: _Optional[int] = ..., row_end_id: _Optional[int] = ..., row_end: _Optional[str] = ..., max_side: _Optional[int] = ..., fills: _Optional[bool] = ...) -> None: ...

class AudioInput(_message.Message):
    __slots__ = ("sampling_rate", "hop", "pad_to", "chunk", "layers", "max_samples", "cross_attention", "token_id", "token", "placeholder", "prefix", "suffix", "whisper", "min_samples", "asr")
    SAMPLING_RATE_FIELD_NUMBER: _ClassVar[int]
    HOP_FIELD_NUMBER: _ClassVar[int]
    PAD_TO_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    MAX_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    CROSS_ATTENTION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    PLACEHOLDER_FIELD_NUMBER: _ClassVar[int]
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    SUFFIX_FIELD_NUMBER: _ClassVar[int]
    WHISPER_FIELD_NUMBER: _ClassVar[int]
    MIN_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    ASR_FIELD_NUMBER: _ClassVar[int]
    sampling_rate: int
    hop: int
    pad_to: int
    chunk: int
    layers: _containers.RepeatedCompositeFieldContainer[AudioLayer]
    max_samples: int
    cross_attention: bool
    token_id: int
    token: str
    placeholder: str
    prefix: str
    suffix: str
    whisper: WhisperPrompts
    min_samples: int
    asr: AsrPrompts
    def __init__(self, sampling_rate: _Optional[int] = ..., hop: _Optional[int] = ..., pad_to: _Optional[int] = ..., chunk: _Optional[int] = ..., layers: _Optional[_Iterable[_Union[AudioLayer, _Mapping]]] = ..., max_samples: _Optional[int] = ..., cross_attention: _Optional[bool] = ..., token_id: _Optional[int] = ..., token: _Optional[str] = ..., placeholder: _Optional[str] = ..., prefix: _Optional[str] = ..., suffix: _Optional[str] = ..., whisper: _Optional[_Union[WhisperPrompts, _Mapping]] = ..., min_samples: _Optional[int] = ..., asr: _Optional[_Union[AsrPrompts, _Mapping]] = ...) -> None: ...

class AudioLayer(_message.Message):
    __slots__ = ("kernel", "stride", "padding")
    KERNEL_FIELD_NUMBER: _ClassVar[int]
    STRIDE_FIELD_NUMBER: _ClassVar[int]
    PADDING_FIELD_NUMBER: _ClassVar[int]
    kernel: int
    stride: int
    padding: int
    def __init__(self, kernel: _Optional[int] = ..., stride: _Optional[int] = ..., padding: _Optional[int] = ...) -> None: ...

class AsrPrompts(_message.Message):
    __slots__ = ("marker_id", "marker", "languages")
    class LanguagesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    MARKER_ID_FIELD_NUMBER: _ClassVar[int]
    MARKER_FIELD_NUMBER: _ClassVar[int]
    LANGUAGES_FIELD_NUMBER: _ClassVar[int]
    marker_id: int
    marker: str
    languages: _containers.ScalarMap[str, str]
    def __init__(self, marker_id: _Optional[int] = ..., marker: _Optional[str] = ..., languages: _Optional[_Mapping[str, str]] = ...) -> None: ...

class WhisperPrompts(_message.Message):
    __slots__ = ("decoder_start_token_id", "languages", "tasks", "no_timestamps_token_id", "timestamp_begin_id", "prev_sot_token_id", "no_speech_token_id", "suppress_tokens", "begin_suppress_tokens", "max_initial_timestamp_index", "max_target_positions", "is_multilingual")
    class LanguagesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class TasksEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    DECODER_START_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LANGUAGES_FIELD_NUMBER: _ClassVar[int]
    TASKS_FIELD_NUMBER: _ClassVar[int]
    NO_TIMESTAMPS_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    TIMESTAMP_BEGIN_ID_FIELD_NUMBER: _ClassVar[int]
    PREV_SOT_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    NO_SPEECH_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    SUPPRESS_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BEGIN_SUPPRESS_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_INITIAL_TIMESTAMP_INDEX_FIELD_NUMBER: _ClassVar[int]
    MAX_TARGET_POSITIONS_FIELD_NUMBER: _ClassVar[int]
    IS_MULTILINGUAL_FIELD_NUMBER: _ClassVar[int]
    decoder_start_token_id: int
    languages: _containers.ScalarMap[str, int]
    tasks: _containers.ScalarMap[str, int]
    no_timestamps_token_id: int
    timestamp_begin_id: int
    prev_sot_token_id: int
    no_speech_token_id: int
    suppress_tokens: _containers.RepeatedScalarFieldContainer[int]
    begin_suppress_tokens: _containers.RepeatedScalarFieldContainer[int]
    max_initial_timestamp_index: int
    max_target_positions: int
    is_multilingual: bool
    def __init__(self, decoder_start_token_id: _Optional[int] = ..., languages: _Optional[_Mapping[str, int]] = ..., tasks: _Optional[_Mapping[str, int]] = ..., no_timestamps_token_id: _Optional[int] = ..., timestamp_begin_id: _Optional[int] = ..., prev_sot_token_id: _Optional[int] = ..., no_speech_token_id: _Optional[int] = ..., suppress_tokens: _Optional[_Iterable[int]] = ..., begin_suppress_tokens: _Optional[_Iterable[int]] = ..., max_initial_timestamp_index: _Optional[int] = ..., max_target_positions: _Optional[int] = ..., is_multilingual: _Optional[bool] = ...) -> None: ...

class CheckpointRule(_message.Message):
    __slots__ = ("interval", "min_junction")
    INTERVAL_FIELD_NUMBER: _ClassVar[int]
    MIN_JUNCTION_FIELD_NUMBER: _ClassVar[int]
    interval: int
    min_junction: int
    def __init__(self, interval: _Optional[int] = ..., min_junction: _Optional[int] = ...) -> None: ...

class GetTokenizerRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetTokenizerResponse(_message.Message):
    __slots__ = ("file_name", "data")
    FILE_NAME_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    file_name: str
    data: bytes
    def __init__(self, file_name: _Optional[str] = ..., data: _Optional[bytes] = ...) -> None: ...

class GetLoadRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetLoadResponse(_message.Message):
    __slots__ = ("stats",)
    STATS_FIELD_NUMBER: _ClassVar[int]
    stats: _core_pb2.SchedulerStats
    def __init__(self, stats: _Optional[_Union[_core_pb2.SchedulerStats, _Mapping]] = ...) -> None: ...

class SubscribeKvEventsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SubscribeKvEventsResponse(_message.Message):
    __slots__ = ("sequence", "snapshot", "stored", "removed", "checkpoints_stored", "checkpoints_removed", "host_stored", "host_removed", "host_checkpoints_stored", "host_checkpoints_removed", "host_snapshot")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINTS_STORED_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINTS_REMOVED_FIELD_NUMBER: _ClassVar[int]
    HOST_STORED_FIELD_NUMBER: _ClassVar[int]
    HOST_REMOVED_FIELD_NUMBER: _ClassVar[int]
    HOST_CHECKPOINTS_STORED_FIELD_NUMBER: _ClassVar[int]
    HOST_CHECKPOINTS_REMOVED_FIELD_NUMBER: _ClassVar[int]
    HOST_SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    snapshot: bool
    stored: bytes
    removed: bytes
    checkpoints_stored: bytes
    checkpoints_removed: bytes
    host_stored: bytes
    host_removed: bytes
    host_checkpoints_stored: bytes
    host_checkpoints_removed: bytes
    host_snapshot: bool
    def __init__(self, sequence: _Optional[int] = ..., snapshot: _Optional[bool] = ..., stored: _Optional[bytes] = ..., removed: _Optional[bytes] = ..., checkpoints_stored: _Optional[bytes] = ..., checkpoints_removed: _Optional[bytes] = ..., host_stored: _Optional[bytes] = ..., host_removed: _Optional[bytes] = ..., host_checkpoints_stored: _Optional[bytes] = ..., host_checkpoints_removed: _Optional[bytes] = ..., host_snapshot: _Optional[bool] = ...) -> None: ...

class GetServerInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetServerInfoResponse(_message.Message):
    __slots__ = ("config",)
    CONFIG_FIELD_NUMBER: _ClassVar[int]
    config: str
    def __init__(self, config: _Optional[str] = ...) -> None: ...

class ResetPrefixCacheRequest(_message.Message):
    __slots__ = ("since",)
    SINCE_FIELD_NUMBER: _ClassVar[int]
    since: float
    def __init__(self, since: _Optional[float] = ...) -> None: ...

class ResetPrefixCacheResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SleepRequest(_message.Message):
    __slots__ = ("level", "wait", "since")
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    WAIT_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    level: int
    wait: bool
    since: float
    def __init__(self, level: _Optional[int] = ..., wait: _Optional[bool] = ..., since: _Optional[float] = ...) -> None: ...

class SleepResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WakeUpRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WakeUpResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LoadLoraRequest(_message.Message):
    __slots__ = ("name", "path", "replace")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    REPLACE_FIELD_NUMBER: _ClassVar[int]
    name: str
    path: str
    replace: bool
    def __init__(self, name: _Optional[str] = ..., path: _Optional[str] = ..., replace: _Optional[bool] = ...) -> None: ...

class LoadLoraResponse(_message.Message):
    __slots__ = ("lora",)
    LORA_FIELD_NUMBER: _ClassVar[int]
    lora: Lora
    def __init__(self, lora: _Optional[_Union[Lora, _Mapping]] = ...) -> None: ...

class UnloadLoraRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class UnloadLoraResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
