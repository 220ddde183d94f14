"""The wire's objects as dataclasses, for the gateway and the engine. `proa.contract.pb` converts them."""

from proa.contract.grammar import Grammar, StructuredOutputsParams
from proa.contract.outputs import (
    EngineCoreOutput,
    EngineCoreOutputs,
    Event,
    EventType,
    FinishReason,
    KvLoad,
    SchedulerStats,
    TokenLogprobs,
)
from proa.contract.request import (
    EngineCoreRequest,
    Image,
    ImageInput,
    KvSource,
    PoolingParams,
    PoolingTask,
    extra_keys,
    image_keys,
)
from proa.contract.sampling_params import RepetitionDetectionParams, SamplingParams
from proa.contract.session import (
    CheckpointRule,
    Draining,
    Hello,
    KvEvents,
    KvTransfer,
    LoadedLoras,
    Lora,
    ModelInfo,
    Rejected,
    Role,
)

__all__ = [
    "CheckpointRule",
    "Draining",
    "EngineCoreOutput",
    "EngineCoreOutputs",
    "EngineCoreRequest",
    "Event",
    "EventType",
    "FinishReason",
    "Grammar",
    "Hello",
    "Image",
    "ImageInput",
    "KvEvents",
    "KvLoad",
    "KvSource",
    "KvTransfer",
    "LoadedLoras",
    "Lora",
    "ModelInfo",
    "PoolingParams",
    "PoolingTask",
    "Rejected",
    "RepetitionDetectionParams",
    "Role",
    "SamplingParams",
    "SchedulerStats",
    "StructuredOutputsParams",
    "TokenLogprobs",
    "extra_keys",
    "image_keys",
]
