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
    from proa.beam_search import BeamSearchParams
    from proa.contract import (
        PoolingParams,
        PoolingTask,
        RepetitionDetectionParams,
        SamplingParams,
        StructuredOutputsParams,
    )
    from proa_engine.config import EngineConfig
    from proa_engine.offline.beam_search import BeamSearchOutput, BeamSearchSequence
    from proa_engine.offline.llm import LLM
    from proa_engine.offline.llm_engine import LLMEngine
    from proa_engine.offline.outputs import CompletionOutput, Logprob, RequestOutput
    from proa_engine.offline.prompts import LoRARequest

__all__ = [
    "LLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
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
    "LLM": "proa_engine.offline.llm",
    "LLMEngine": "proa_engine.offline.llm_engine",
    "BeamSearchOutput": "proa_engine.offline.beam_search",
    "BeamSearchParams": "proa.beam_search",
    "BeamSearchSequence": "proa_engine.offline.beam_search",
    "CompletionOutput": "proa_engine.offline.outputs",
    "EngineConfig": "proa_engine.config",
    "LoRARequest": "proa_engine.offline.prompts",
    "Logprob": "proa_engine.offline.outputs",
    "PoolingParams": "proa.contract",
    "PoolingTask": "proa.contract",
    "RequestOutput": "proa_engine.offline.outputs",
    "RepetitionDetectionParams": "proa.contract",
    "SamplingParams": "proa.contract",
    "StructuredOutputsParams": "proa.contract",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
