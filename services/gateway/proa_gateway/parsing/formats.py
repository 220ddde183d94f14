"""All tool formats, by family."""

# ruff: noqa: RUF001 - the tokens have a fullwidth bar

import string
from dataclasses import replace

from proa_gateway.parsing.format import (
    CallObject,
    Channels,
    Json,
    NamedIds,
    ObjectLiteral,
    PythonCall,
    RandomIds,
    Route,
    Tagged,
    ToolFormat,
)

# DeepSeek: JSON between tokens until V3.1, calls in tags since V3.2.
DEEPSEEK_V3 = ToolFormat(
    name="deepseek_v3",
    signs=("<｜tool▁calls▁begin｜>", "```json"),
    reasoning=("<think>", "</think>"),
    section=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    call="<｜tool▁call▁begin｜>function<｜tool▁sep｜>$name\n```json\n$arguments\n```<｜tool▁call▁end｜>",
    between="\n",
    arguments=Json(),
)

DEEPSEEK_V31 = replace(
    DEEPSEEK_V3,
    name="deepseek_v31",
    signs=("<｜tool▁calls▁begin｜>", "<｜tool▁sep｜>"),
    call="<｜tool▁call▁begin｜>$name<｜tool▁sep｜>$arguments<｜tool▁call▁end｜>",
    between="",
)

DEEPSEEK_V32 = replace(
    DEEPSEEK_V3,
    name="deepseek_v32",
    signs=("｜DSML｜", "function_calls>"),
    section=("<｜DSML｜function_calls>\n", "\n</｜DSML｜function_calls>"),
    call='<｜DSML｜invoke name="$name">\n$arguments</｜DSML｜invoke>',
    text_tokens=("｜DSML｜",),
    arguments=Tagged('<｜DSML｜parameter name="$key" string="$is_string">$value</｜DSML｜parameter>\n'),
)

DEEPSEEK_V4 = replace(
    DEEPSEEK_V32,
    name="deepseek_v4",
    signs=("｜DSML｜", "tool_calls>"),
    section=("<｜DSML｜tool_calls>\n", "\n</｜DSML｜tool_calls>"),
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

# GLM-4.5 and GLM-4.7: keys and values in tags, with and without lines.
GLM45 = ToolFormat(
    name="glm45",
    signs=("<arg_key>", "<arg_value>"),
    reasoning=("<think>", "</think>"),
    call="<tool_call>$name\n$arguments</tool_call>",
    between="\n",
    arguments=Tagged("<arg_key>$key</arg_key>\n<arg_value>$value</arg_value>\n"),
)

GLM47 = replace(
    GLM45,
    name="glm47",
    signs=("</arg_key><arg_value>",),
    call="<tool_call>$name$arguments</tool_call>",
    between="",
    arguments=Tagged("<arg_key>$key</arg_key><arg_value>$value</arg_value>"),
)

# Gpt-oss: messages in channels.
HARMONY = ToolFormat(
    name="harmony",
    signs=("<|channel|>", "<|message|>"),
    call="<|channel|>commentary to=functions.$name <|constrain|>json<|message|>$arguments",
    arguments=Json(),
    channels=Channels(
        open="<|channel|>",
        body="<|message|>",
        close=("<|end|>", "<|call|>", "<|return|>"),
        next="<|start|>assistant",
        routes=(
            (r".*\bto=functions\.(?P<name>[^\s<]+)", Route.CALL),
            (r"analysis", Route.REASONING),
            (r"final|commentary", Route.CONTENT),
        ),
        reasoning="analysis",
        preamble="commentary",
        answer="final",
    ),
)

# Hermes' format, also of Qwen2.5 and Qwen3.
HERMES = ToolFormat(
    name="hermes",
    signs=("<tool_call>", '"arguments"'),
    reasoning=("<think>", "</think>"),
    call='<tool_call>\n{"name": "$name", "arguments": $arguments}\n</tool_call>',
    between="\n",
    arguments=CallObject(name="name", arguments="arguments", aliases=("parameters",)),
)

# Kimi K2: a section of calls, whose ids hold their names.
KIMI_K2 = ToolFormat(
    name="kimi_k2",
    signs=("<|tool_calls_section_begin|>", "<|tool_call_argument_begin|>"),
    reasoning=("<think>", "</think>"),
    section=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    call="<|tool_call_begin|>$id<|tool_call_argument_begin|>$arguments<|tool_call_end|>",
    arguments=Json(),
    call_ids=NamedIds("functions.$name:$index"),
)

# Llama 3.1 to 4: an answer that is a JSON object.
LLAMA3_JSON = ToolFormat(
    name="llama3_json",
    signs=('"parameters": dictionary of argument name',),
    call='{"name": "$name", "parameters": $arguments}',
    between="; ",
    arguments=CallObject(name="name", arguments="parameters", aliases=("arguments",)),
    also_opens=("<|python_tag|>",),
    at_start=True,
    dropped=("<|python_start|>", "<|python_end|>"),  # of Llama 4
)

# MiniMax-M2: a section of calls in tags.
MINIMAX_M2 = ToolFormat(
    name="minimax_m2",
    signs=("<minimax:tool_call>", "<invoke name="),
    reasoning=("<think>", "</think>"),
    section=("<minimax:tool_call>\n", "\n</minimax:tool_call>"),
    call='<invoke name="$name">\n$arguments</invoke>',
    between="\n",
    arguments=Tagged('<parameter name="$key">$value</parameter>\n'),
)

# Mistral's tokenizers: a list of envelopes until version 7, then names and arguments between tokens.
_IDS = RandomIds(prefix="", alphabet=string.ascii_letters + string.digits, length=9)

MISTRAL = ToolFormat(
    name="mistral",
    signs=("[TOOL_CALLS]",),
    reasoning=("[THINK]", "[/THINK]"),
    section=("[TOOL_CALLS] [", "]"),
    call='{"name": "$name", "arguments": $arguments}',
    between=", ",
    arguments=CallObject(name="name", arguments="arguments"),
    call_ids=_IDS,
)

MISTRAL_V11 = replace(
    MISTRAL,
    name="mistral_v11",
    signs=("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
    section=None,
    call="[TOOL_CALLS]$name[CALL_ID]$id[ARGS]$arguments",
    between="",
    arguments=Json(),
)

MISTRAL_V13 = replace(
    MISTRAL_V11,
    name="mistral_v13",
    signs=("[TOOL_CALLS]", "[ARGS]"),
    optional="[CALL_ID]$id",
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
    dropped=("<|tool_call_end|>",),
)

OLMO3 = replace(
    LFM2,
    name="olmo3",
    signs=("<function_calls>",),
    section=("<function_calls>\n", "\n</function_calls>"),
    between="\n",
    dropped=(),
)

# Qwen3-Coder and Qwen3.5: calls in tags.
QWEN3_CODER = ToolFormat(
    name="qwen3_coder",
    signs=("<function=", "<parameter="),
    reasoning=("<think>", "</think>"),
    call="<tool_call>\n<function=$name>\n$arguments</function>\n</tool_call>",
    between="\n",
    arguments=Tagged("<parameter=$key>\n$value\n</parameter>\n"),
    also_opens=("<function=",),
)

# In the order in which a chat template's signs are looked for: formats with more signs before those whose signs also
# stand in the others' templates.
FORMATS: tuple[ToolFormat, ...] = (
    *(HARMONY, GEMMA4, FUNCTIONGEMMA, KIMI_K2, MINIMAX_M2, GLM47, GLM45, QWEN3_CODER),
    *(DEEPSEEK_V32, DEEPSEEK_V4, DEEPSEEK_V3, DEEPSEEK_V31, MISTRAL_V11, MISTRAL_V13, MISTRAL),
    *(LFM2, OLMO3, LLAMA3_JSON, PYTHONIC, HERMES),
)
