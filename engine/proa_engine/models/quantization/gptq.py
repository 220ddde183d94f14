"""`quantization_config` of AutoGPTQ and GPTQModel, and of AutoRound in the layouts of GPTQ and AWQ."""

import re
from collections.abc import Mapping
from typing import Any

from proa_engine.models.quantization.fields import group_size, only
from proa_engine.models.quantization.formats import AwqFormat, Format, GptqFormat, Quantization, Rule

Fields = Mapping[str, Any]


def read_gptq(stored: Fields) -> Quantization:
    only("checkpoint_format", stored.get("checkpoint_format", "gptq"), ("gptq", "gptq_v2"))
    only("lm_head", stored.get("lm_head", False), (False,))
    rules = [_gptq_rule(pattern, stored, changed) for pattern, changed in (stored.get("dynamic") or {}).items()]
    return Quantization(_gptq(stored), tuple(rules))


def _gptq_rule(pattern: str, stored: Fields, changed: Fields | None) -> Rule:
    """GPTQModel's `dynamic`: "-:" and a pattern of modules that are not quantized, or "+:", which may be absent, and a
    pattern of modules for which some fields are `changed`."""
    if pattern.startswith("-:"):
        return Rule((f"re:{pattern[2:]}",), None)
    return Rule((f"re:{pattern.removeprefix('+:')}",), _gptq({**stored, **(changed or {})}))


def _gptq(stored: Fields) -> GptqFormat:
    only("bits", stored.get("bits"), (4, 8))
    return GptqFormat(
        stored["bits"],
        group_size(stored),
        desc_act=stored.get("desc_act", False),
        symmetric=stored.get("sym", False),
        zero_offset=0 if stored.get("checkpoint_format") == "gptq_v2" else 1,
    )


def read_auto_round(stored: Fields) -> Quantization:
    """AutoRound's weights in the layout of GPTQ's version 1, or of AWQ.

    `extra_config` has other settings of single modules, by name or by a pattern that is searched for in the names, of
    which the first holds.
    """
    only("packing_format", stored.get("packing_format"), ("auto_round:auto_gptq", "auto_round:auto_awq"))
    names: list[Rule] = []
    patterns: list[Rule] = []
    for entry, changed in (stored.get("extra_config") or {}).items():
        is_pattern = re.search(r"[*+?^$()\[\]{}|\\]", entry) is not None
        rule = Rule((f"re:.*(?:{entry})" if is_pattern else entry,), _auto_round_module(entry, {**stored, **changed}))
        (patterns if is_pattern else names).append(rule)
    return Quantization(_auto_round(stored), (*names, *patterns))


def _auto_round_module(entry: str, stored: Fields) -> Format | None:
    """The format of the modules of an entry of extra_config; None: they have 16 or 32 bits."""
    if stored["bits"] >= 16:
        return None
    try:
        return _auto_round(stored)
    except ValueError as error:
        raise ValueError(f"extra_config of {entry}: {error}") from error


def _auto_round(stored: Fields) -> Format:
    is_awq = stored["packing_format"] == "auto_round:auto_awq"
    only("bits", stored.get("bits"), (4,) if is_awq else (4, 8))
    only("data_type", stored.get("data_type", "int"), ("int",))
    only("act_bits", stored.get("act_bits") or 16, (16, 32))
    if is_awq:
        return AwqFormat(group_size(stored))
    return GptqFormat(
        stored["bits"], group_size(stored), desc_act=False, symmetric=stored.get("sym", True), zero_offset=1
    )
