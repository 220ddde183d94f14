"""All tool formats, each in a file of its family.

`FORMATS` is in the order in which a chat template's signs are looked for: those with more signs before those whose
signs also stand in the others' templates.
"""

from proa_gateway.parsing.format import ToolFormat
from proa_gateway.parsing.formats.deepseek import DEEPSEEK_V3, DEEPSEEK_V4, DEEPSEEK_V31, DEEPSEEK_V32
from proa_gateway.parsing.formats.gemma import FUNCTIONGEMMA, GEMMA4
from proa_gateway.parsing.formats.glm import GLM45, GLM47
from proa_gateway.parsing.formats.harmony import HARMONY
from proa_gateway.parsing.formats.hermes import HERMES
from proa_gateway.parsing.formats.kimi_k2 import KIMI_K2
from proa_gateway.parsing.formats.llama3_json import LLAMA3_JSON
from proa_gateway.parsing.formats.minimax_m2 import MINIMAX_M2
from proa_gateway.parsing.formats.mistral import MISTRAL, MISTRAL_V11, MISTRAL_V13
from proa_gateway.parsing.formats.pythonic import LFM2, OLMO3, PYTHONIC
from proa_gateway.parsing.formats.qwen3_coder import QWEN3_CODER

FORMATS: tuple[ToolFormat, ...] = (
    *(HARMONY, GEMMA4, FUNCTIONGEMMA, KIMI_K2, MINIMAX_M2, GLM47, GLM45, QWEN3_CODER),
    *(DEEPSEEK_V32, DEEPSEEK_V4, DEEPSEEK_V3, DEEPSEEK_V31, MISTRAL_V11, MISTRAL_V13, MISTRAL),
    *(LFM2, OLMO3, LLAMA3_JSON, PYTHONIC, HERMES),
)

__all__ = ["FORMATS"]
