"""Tool formats in which calls, or their arguments, are JSON."""

# ruff: noqa: RUF001 - the tokens have a fullwidth bar

import string
from dataclasses import replace

from proa_gateway.parsing.format import CallObject, Channels, Json, NamedIds, RandomIds, Route, ToolFormat

_THINK = ("<think>", "</think>")
_CALL = '{"name": "$name", "arguments": $arguments}'
_CALL_OBJECT = CallObject(name="name", arguments="arguments")

# DeepSeek until V3.1: JSON between tokens.
DEEPSEEK_V3 = ToolFormat(
    name="deepseek_v3",
    signs=("<｜tool▁calls▁begin｜>", "```json"),
    reasoning=_THINK,
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
    reasoning=_THINK,
    call='<tool_call>\n{"name": "$name", "arguments": $arguments}\n</tool_call>',
    between="\n",
    arguments=CallObject(name="name", arguments="arguments", aliases=("parameters",)),
)

# Kimi K2: a section of calls, whose ids hold their names.
KIMI_K2 = ToolFormat(
    name="kimi_k2",
    signs=("<|tool_calls_section_begin|>", "<|tool_call_argument_begin|>"),
    reasoning=_THINK,
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

# Mistral's tokenizers: a list of envelopes until version 7, then names and arguments between tokens.
_IDS = RandomIds(prefix="", alphabet=string.ascii_letters + string.digits, length=9)

MISTRAL = ToolFormat(
    name="mistral",
    signs=("[TOOL_CALLS]",),
    reasoning=("[THINK]", "[/THINK]"),
    section=("[TOOL_CALLS] [", "]"),
    call=_CALL,
    between=", ",
    arguments=_CALL_OBJECT,
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

# Apertus: a list of objects whose only key is the function's name.
APERTUS = ToolFormat(
    name="apertus",
    signs=("<|tools_prefix|>",),
    reasoning=("<|inner_prefix|>", "<|inner_suffix|>"),
    section=("<|tools_prefix|>[", "]<|tools_suffix|>"),
    call='{"$name": $arguments}',
    between=", ",
    arguments=Json(),
)

# Command A, Command R7B and later models of Cohere.
COHERE = ToolFormat(
    name="cohere",
    signs=("<|START_ACTION|>", "tool_name"),
    reasoning=("<|START_THINKING|>", "<|END_THINKING|>"),
    section=("<|START_ACTION|>[\n    ", "\n]<|END_ACTION|>"),
    call='{"tool_call_id": "$index", "tool_name": "$name", "parameters": $arguments}',
    between=",\n    ",
    arguments=CallObject(name="tool_name", arguments="parameters"),
    dropped=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
)

# ERNIE 4.5: as Hermes, with its answers in tags.
ERNIE45 = replace(
    HERMES,
    name="ernie45",
    signs=("<tool_call>", "<response>"),
    dropped=("<response>", "</response>"),
)

# Functionary 3.1: one tag around the arguments.
FUNCTIONARY = ToolFormat(
    name="functionary",
    signs=("<function=", "</function>"),
    call="<function=$name>$arguments</function>",
    arguments=Json(),
)

# GigaChat 3.1; GigaChat 3 has the name of a role in place of the token.
GIGACHAT3 = ToolFormat(
    name="gigachat3",
    signs=("role_sep", "message_sep"),
    call='<|function_call|>{"name": "$name", "arguments": $arguments}',
    arguments=_CALL_OBJECT,
    also_opens=("function call<|role_sep|>\n",),
)

# InternLM 2: an action for each call.
INTERNLM = ToolFormat(
    name="internlm",
    signs=("<|action_start|>", "<|plugin|>"),
    section=("<|action_start|><|plugin|>\n", "<|action_end|>"),
    call='{"name": "$name", "parameters": $arguments}',
    between="<|action_end|>\n<|action_start|><|plugin|>\n",
    arguments=CallObject(name="name", arguments="parameters", aliases=("arguments",)),
)

LONGCAT = ToolFormat(
    name="longcat",
    signs=("<longcat_tool_call>",),
    reasoning=("<longcat_think>", "</longcat_think>"),
    call='<longcat_tool_call>\n{"name": "$name", "arguments": $arguments}\n</longcat_tool_call>',
    between="\n",
    arguments=_CALL_OBJECT,
)

# A list between tags: Hunyuan A13B and Apriel, Jamba, Nemotron Nano v2; MiniMax-M1 without brackets.
HUNYUAN_A13B = ToolFormat(
    name="hunyuan_a13b",
    signs=("<tool_calls>[",),
    reasoning=_THINK,
    section=("<tool_calls>[", "]</tool_calls>"),
    call=_CALL,
    between=", ",
    arguments=_CALL_OBJECT,
)

JAMBA = replace(
    HUNYUAN_A13B,
    name="jamba",
    signs=("<tool_calls>", "</tool_calls>"),
    section=("<tool_calls>[\n    ", "\n]</tool_calls>"),
    between=",\n    ",
)

NEMOTRON_NANO_V2 = replace(
    HUNYUAN_A13B,
    name="nemotron_nano_v2",
    signs=("<TOOLCALL>",),
    section=("<TOOLCALL>[", "]</TOOLCALL>"),
)

MINIMAX_M1 = replace(
    HUNYUAN_A13B,
    name="minimax_m1",
    signs=("<tool_calls>", "</tool_calls>"),
    section=("<tool_calls>\n", "\n</tool_calls>"),
    between="\n",
)

# Phi-4-mini: a list after a word.
PHI4_MINI = ToolFormat(
    name="phi4_mini_json",
    signs=("functools[",),
    section=("functools[", "]"),
    call=_CALL,
    between=", ",
    arguments=_CALL_OBJECT,
    at_start=True,
)

# Solar Open: tokens around the id, the name and the arguments, and before each part of an answer.
SOLAR_OPEN = ToolFormat(
    name="solar_open",
    signs=("<|tool_call:begin|>", "<|tool_call:args|>"),
    reasoning=("<|think|>", "<|end|>"),
    section=("<|tool_calls|>", "<|calls|>"),
    call="<|tool_call:begin|>$id<|tool_call:name|>$name<|tool_call:args|>$arguments<|tool_call:end|>",
    arguments=Json(),
    dropped=("<|begin|>assistant", "<|content|>", "<|flush|>"),
    call_ids=RandomIds(prefix="", alphabet=string.ascii_lowercase + string.digits, length=10),
)
