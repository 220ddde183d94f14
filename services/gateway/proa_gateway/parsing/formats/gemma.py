"""The formats of Gemma 4 and FunctionGemma: objects with bare keys, and quotes that are tokens."""

from proa_gateway.parsing.format import ObjectLiteral, ToolFormat

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
