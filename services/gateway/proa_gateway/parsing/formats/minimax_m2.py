"""The format of MiniMax-M2: a section of calls in tags."""

from proa_gateway.parsing.format import Tagged, ToolFormat

MINIMAX_M2 = ToolFormat(
    name="minimax_m2",
    signs=("<minimax:tool_call>", "<invoke name="),
    reasoning=("<think>", "</think>"),
    section=("<minimax:tool_call>\n", "\n</minimax:tool_call>"),
    call='<invoke name="$name">\n$arguments</invoke>',
    between="\n",
    arguments=Tagged('<parameter name="$key">$value</parameter>\n'),
)
