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
    PoolingParams,
    PoolingTask,
    extra_keys,
    image_keys,
)
from proa.contract.sampling_params import RepetitionDetectionParams, SamplingParams
from proa.contract.session import CheckpointRule, Draining, Hello, KvEvents, LoadedLoras, Lora, ModelInfo, Rejected

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
    "LoadedLoras",
    "Lora",
    "ModelInfo",
    "PoolingParams",
    "PoolingTask",
    "Rejected",
    "RepetitionDetectionParams",
    "SamplingParams",
    "SchedulerStats",
    "StructuredOutputsParams",
    "TokenLogprobs",
    "extra_keys",
    "image_keys",
]
