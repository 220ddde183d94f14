"""Hermes' format, also of Qwen2.5 and Qwen3."""

from proa_gateway.parsing.format import Envelope, ToolFormat

HERMES = ToolFormat(
    name="hermes",
    signs=("<tool_call>", '"arguments"'),
    reasoning=("<think>", "</think>"),
    call='<tool_call>\n{"name": "$name", "arguments": $arguments}\n</tool_call>',
    between="\n",
    arguments=Envelope(name="name", arguments="arguments", aliases=("parameters",)),
)
