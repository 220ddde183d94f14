"""The format of Qwen3-Coder and Qwen3.5: calls in tags."""

from proa_gateway.parsing.format import Tagged, ToolFormat

QWEN3_CODER = ToolFormat(
    name="qwen3_coder",
    signs=("<function=", "<parameter="),
    reasoning=("<think>", "</think>"),
    call="<tool_call>\n<function=$name>\n$arguments</function>\n</tool_call>",
    between="\n",
    arguments=Tagged("<parameter=$key>\n$value\n</parameter>\n"),
    also_opens=("<function=",),
)
