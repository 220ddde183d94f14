"""The formats of Mistral's tokenizers: a list of envelopes until version 7, then names and arguments between tokens."""

import string
from dataclasses import replace

from proa_gateway.parsing.format import Envelope, Json, RandomIds, ToolFormat

_IDS = RandomIds(prefix="", alphabet=string.ascii_letters + string.digits, length=9)

MISTRAL = ToolFormat(
    name="mistral",
    signs=("[TOOL_CALLS]",),
    reasoning=("[THINK]", "[/THINK]"),
    section=("[TOOL_CALLS] [", "]"),
    call='{"name": "$name", "arguments": $arguments}',
    between=", ",
    arguments=Envelope(name="name", arguments="arguments"),
    call_ids=_IDS,
)

MISTRAL_V11 = replace(
    MISTRAL,
    name="mistral_v11",
    signs=("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
    section=None,
    call="[TOOL_CALLS]$name[CALL_ID]$id[ARGS]$arguments",
    between="",
    arguments=Json(),
)

MISTRAL_V13 = replace(
    MISTRAL_V11,
    name="mistral_v13",
    signs=("[TOOL_CALLS]", "[ARGS]"),
    optional="[CALL_ID]$id",
)
