"""Proa's engine. `LLM` generates in this process; `proa-engine serve` does it behind gRPC.

    from proa_engine import LLM, SamplingParams

    llm = LLM("builtin")
    for output in llm.generate(["Hello"], SamplingParams(temperature=0, max_tokens=16)):
        print(output.outputs[0].text)

Names are imported when they are first used, so that the core can be imported without anything else.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from proa_engine.config import EngineConfig
    from proa_engine.core.sampling_params import SamplingParams
    from proa_engine.llm import LLM
    from proa_engine.llm_engine import LLMEngine
    from proa_engine.outputs import CompletionOutput, Logprob, RequestOutput

__all__ = ["LLM", "CompletionOutput", "EngineConfig", "LLMEngine", "Logprob", "RequestOutput", "SamplingParams"]

_HOMES = {
    "LLM": "llm",
    "LLMEngine": "llm_engine",
    "CompletionOutput": "outputs",
    "EngineConfig": "config",
    "Logprob": "outputs",
    "RequestOutput": "outputs",
    "SamplingParams": "core.sampling_params",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
