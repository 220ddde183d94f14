"""`quantization_config` of AutoGPTQ and GPTQModel, and of AutoRound in GPTQ's layout."""

from collections.abc import Mapping
from typing import Any

from proa_engine.models.quantization.fields import group_size, only
from proa_engine.models.quantization.formats import GptqFormat, Quantization


def read_gptq(stored: Mapping[str, Any]) -> Quantization:
    only("bits", stored.get("bits"), (4,))
    only("checkpoint_format", stored.get("checkpoint_format", "gptq"), ("gptq", "gptq_v2"))
    only("dynamic", stored.get("dynamic") or None, (None,))
    only("lm_head", stored.get("lm_head", False), (False,))
    return Quantization(
        GptqFormat(
            group_size(stored),
            desc_act=stored.get("desc_act", False),
            symmetric=stored.get("sym", False),
            zero_offset=0 if stored.get("checkpoint_format") == "gptq_v2" else 1,
        )
    )


def read_auto_round(stored: Mapping[str, Any]) -> Quantization:
    """AutoRound's weights in the layout of GPTQ's version 1."""
    only("bits", stored.get("bits"), (4,))
    only("packing_format", stored.get("packing_format"), ("auto_round:auto_gptq",))
    only("data_type", stored.get("data_type", "int"), ("int",))
    only("act_bits", stored.get("act_bits") or 16, (16, 32))
    symmetric = stored.get("sym", True)
    stored_as = GptqFormat(group_size(stored), desc_act=False, symmetric=symmetric, zero_offset=1)
    return Quantization(stored_as).except_for(*_kept_by_auto_round(stored))


def _kept_by_auto_round(stored: Mapping[str, Any]) -> tuple[str, ...]:
    """The modules that `extra_config` leaves in 16 or 32 bits. Other settings of single modules are refused."""
    kept = []
    for name, settings in (stored.get("extra_config") or {}).items():
        bits = settings.get("bits", stored["bits"])
        if bits >= 16:
            kept.append(name)
            continue
        for field in ("bits", "group_size", "sym"):
            if settings.get(field, stored.get(field)) != stored.get(field):
                raise ValueError(
                    f"quantization with {field} {settings[field]} for {name} (extra_config) is not supported; "
                    "supported: that of the other modules, or bits 16"
                )
    return tuple(kept)
