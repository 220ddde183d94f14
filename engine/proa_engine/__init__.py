"""Proa's engine. `LLM` generates in this process, `proa-engine serve` over gRPC.

    from proa_engine import LLM, SamplingParams

    llm = LLM("builtin")
    for output in llm.generate(["Hello"], SamplingParams(temperature=0, max_tokens=16)):
        print(output.outputs[0].text)

Each name below is imported when it is first used, so that importing `proa_engine.core` imports nothing else.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from proa.contract import (
        PoolingParams,
        PoolingTask,
        RepetitionDetectionParams,
        SamplingParams,
        StructuredOutputsParams,
    )
    from proa_engine.config import EngineConfig
    from proa_engine.llm import LLM
    from proa_engine.llm_engine import LLMEngine
    from proa_engine.lora_request import LoRARequest
    from proa_engine.outputs import CompletionOutput, Logprob, RequestOutput

__all__ = [
    "LLM",
    "CompletionOutput",
    "EngineConfig",
    "LLMEngine",
    "LoRARequest",
    "Logprob",
    "PoolingParams",
    "PoolingTask",
    "RepetitionDetectionParams",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
]

_MODULES = {
    "LLM": "proa_engine.llm",
    "LLMEngine": "proa_engine.llm_engine",
    "CompletionOutput": "proa_engine.outputs",
    "EngineConfig": "proa_engine.config",
    "LoRARequest": "proa_engine.lora_request",
    "Logprob": "proa_engine.outputs",
    "PoolingParams": "proa.contract",
    "PoolingTask": "proa.contract",
    "RequestOutput": "proa_engine.outputs",
    "RepetitionDetectionParams": "proa.contract",
    "SamplingParams": "proa.contract",
    "StructuredOutputsParams": "proa.contract",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
