"""The formats of GLM-4.5 and GLM-4.7: keys and values in tags, with and without lines."""

from dataclasses import replace

from proa_gateway.parsing.format import Tagged, ToolFormat

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
