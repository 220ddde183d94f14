"""The keyword arguments and methods of the offline `LLM`."""

import inspect
import re
import subprocess
import sys
from typing import Any, get_type_hints

import pytest

from proa.options import flat_hints
from proa_engine.config import EngineConfig
from proa_engine.offline.arguments import EngineArguments
from proa_engine.offline.llm import LLM, REFUSED
from support.documentation import ROOT

PAGE = ROOT / "docs/offline.md"
OWN = {"model", "served_model_name", "speculative_config", "pooler_config"}  # parameters of `LLM.__init__` itself
INTERNAL = {"peer_tls"}
VLLM_METHODS = [
    "apply_model",
    "beam_search",
    "chat",
    "classify",
    "collective_rpc",
    "embed",
    "encode",
    "enqueue",
    "enqueue_chat",
    "finish_weight_update",
    "from_engine_args",
    "generate",
    "get_default_sampling_params",
    "get_metrics",
    "get_tokenizer",
    "get_weight_version",
    "get_world_size",
    "init_weight_transfer_engine",
    "reset_mm_cache",
    "reset_prefix_cache",
    "score",
    "sleep",
    "start_draft_weight_update",
    "start_profile",
    "start_weight_update",
    "stop_profile",
    "update_weight_version",
    "update_weights",
    "wait_for_completion",
    "wake_up",
]
"""The public methods of `vllm.LLM` in vLLM 0.33."""


def test_arguments_are_the_fields_of_the_configuration_with_their_types() -> None:
    hints = flat_hints(EngineConfig)

    assert get_type_hints(EngineArguments) == {name: hints[name] for name in hints.keys() - OWN - INTERNAL}
    assert inspect.signature(LLM.__init__).parameters.keys() >= OWN


def test_the_types_of_arguments_are_generated() -> None:
    subprocess.run([sys.executable, ROOT / "scripts/llm-arguments", "--check"], check=True)


def test_an_unknown_argument_is_refused_with_the_name_that_is_meant() -> None:
    unknown: dict[str, Any] = {"max_num_sequences": 3}
    with pytest.raises(TypeError, match="unexpected keyword argument 'max_num_sequences'; did you mean 'max_num_seqs'"):
        LLM("builtin", **unknown)


def test_each_method_of_vllm_is_here_or_refused() -> None:
    public = {name for name, _ in inspect.getmembers(LLM) if not name.startswith("_")} - {"llm_engine"}

    assert public | REFUSED.keys() == set(VLLM_METHODS)
    assert not public & REFUSED.keys()


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_refused_method_says_why(name: str) -> None:
    llm = LLM.__new__(LLM)
    with pytest.raises(AttributeError, match=re.escape(f"LLM.{name} is not supported: {REFUSED[name]}")):
        getattr(llm, name)


def test_the_page_has_a_line_for_each_method_of_vllm() -> None:
    lines = re.findall(r"^\| `(\w+)` \| (\w+) \|", PAGE.read_text(), re.MULTILINE)

    assert [name for name, _ in lines] == VLLM_METHODS
    assert {name for name, state in lines if state == "refused"} == REFUSED.keys()
