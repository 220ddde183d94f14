"""The formats of models that write Python calls: Llama 3.2 and 4, LFM2, OLMo 3."""

from dataclasses import replace

from proa_gateway.parsing.format import PythonCall, ToolFormat

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
