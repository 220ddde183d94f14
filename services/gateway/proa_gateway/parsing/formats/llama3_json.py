"""The format of Llama 3.1 to 3.3: an answer that is a JSON object."""

from proa_gateway.parsing.format import Envelope, ToolFormat

LLAMA3_JSON = ToolFormat(
    name="llama3_json",
    signs=('"parameters": dictionary of argument name',),
    call='{"name": "$name", "parameters": $arguments}',
    between="; ",
    arguments=Envelope(name="name", arguments="parameters", aliases=("arguments",)),
    also_opens=("<|python_tag|>",),
    at_start=True,
)
