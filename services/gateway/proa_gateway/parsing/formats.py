"""FORMATS: all tool formats, and those that write calls neither as JSON nor in tags."""

from dataclasses import replace

from proa_gateway.parsing.format import ObjectLiteral, PythonCall, ToolFormat
from proa_gateway.parsing.json_formats import (
    APERTUS,
    COHERE,
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    ERNIE45,
    FUNCTIONARY,
    GIGACHAT3,
    HARMONY,
    HERMES,
    HUNYUAN_A13B,
    INTERNLM,
    JAMBA,
    KIMI_K2,
    LLAMA3_JSON,
    LONGCAT,
    MINIMAX_M1,
    MISTRAL,
    MISTRAL_V11,
    MISTRAL_V13,
    NEMOTRON_NANO_V2,
    PHI4_MINI,
    SOLAR_OPEN,
)
from proa_gateway.parsing.tagged_formats import (
    DEEPSEEK_V4,
    DEEPSEEK_V32,
    GLM45,
    GLM47,
    HY_V3,
    HY_V3_OPENSOURCE,
    KIMI_K3,
    MINICPM5,
    MINIMAX_M2,
    MINIMAX_M3,
    MUSE_GLIMMER,
    QWEN3_CODER,
    SEED_OSS,
    STEP3,
)

# Gemma 4 and FunctionGemma: objects with bare keys, and quotes that are tokens.
GEMMA4 = ToolFormat(
    name="gemma4",
    signs=("<|tool_call>", "call:"),
    reasoning=("<|channel>thought\n", "<channel|>"),
    call="<|tool_call>call:$name{$arguments}<tool_call|>",
    arguments=ObjectLiteral(quote='<|"|>'),
)

FUNCTIONGEMMA = ToolFormat(
    name="functiongemma",
    signs=("<start_function_call>", "<escape>"),
    call="<start_function_call>call:$name{$arguments}<end_function_call>",
    arguments=ObjectLiteral(quote="<escape>"),
)

# Models that write Python calls: Llama 3.2 and 4, LFM2, OLMo 3.
PYTHONIC = ToolFormat(
    name="pythonic",
    signs=("[func_name1(",),
    section=("[", "]"),
    call="$name($arguments)",
    between=", ",
    arguments=PythonCall(),
    at_start=True,
    dropped=("<|python_start|>", "<|python_end|>"),
)

LFM2 = replace(
    PYTHONIC,
    name="lfm2",
    signs=("<|tool_call_start|>",),
    reasoning=("<think>", "</think>"),
    section=("<|tool_call_start|>[", "]<|tool_call_end|>"),
    at_start=False,
    dropped=(),
)

OLMO3 = replace(
    LFM2,
    name="olmo3",
    signs=("<function_calls>",),
    section=("<function_calls>\n", "\n</function_calls>"),
    between="\n",
)

# In the order in which a chat template's signs are looked for: formats with more signs before those whose signs also
# stand in the others' templates.
FORMATS: tuple[ToolFormat, ...] = (
    *(HARMONY, MUSE_GLIMMER, GEMMA4, FUNCTIONGEMMA, KIMI_K2, SOLAR_OPEN, APERTUS, COHERE, INTERNLM, KIMI_K3),
    *(MINIMAX_M3, MINIMAX_M2, STEP3, HY_V3_OPENSOURCE, HY_V3, GLM47, GLM45, SEED_OSS, QWEN3_CODER, MINICPM5),
    *(FUNCTIONARY, DEEPSEEK_V32, DEEPSEEK_V4, DEEPSEEK_V3, DEEPSEEK_V31, MISTRAL_V11, MISTRAL_V13, MISTRAL),
    *(NEMOTRON_NANO_V2, LONGCAT, GIGACHAT3, HUNYUAN_A13B, JAMBA, MINIMAX_M1),
    *(LFM2, OLMO3, LLAMA3_JSON, PHI4_MINI, PYTHONIC, ERNIE45, HERMES),
)
