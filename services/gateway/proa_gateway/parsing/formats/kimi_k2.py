"""The format of Kimi K2: a section of calls, whose ids hold their names."""

from proa_gateway.parsing.format import Json, NamedIds, ToolFormat

KIMI_K2 = ToolFormat(
    name="kimi_k2",
    signs=("<|tool_calls_section_begin|>", "<|tool_call_argument_begin|>"),
    reasoning=("<think>", "</think>"),
    section=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    call="<|tool_call_begin|>$id<|tool_call_argument_begin|>$arguments<|tool_call_end|>",
    arguments=Json(),
    call_ids=NamedIds("functions.$name:$index"),
)
