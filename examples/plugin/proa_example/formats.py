"""Formats in which a model writes tool calls and reasoning."""

from proa_gateway.parsing.format import Json, ToolFormat

ARROW = ToolFormat(
    name="arrow",
    signs=("=>call ",),  # in the chat template of models with this format
    call="=>call $name $arguments\n",
    arguments=Json(),
)

THOUGHTS = ("<thoughts>", "</thoughts>")
