"""The format of gpt-oss: messages in channels."""

from proa_gateway.parsing.format import Channels, Json, Route, ToolFormat

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
