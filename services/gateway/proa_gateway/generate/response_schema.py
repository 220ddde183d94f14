"""Responses of `/generate`, for the OpenAPI document. `answer.py` writes them without these classes."""

from typing import Any, Literal

from pydantic import BaseModel

Entry = tuple[float | None, int, str | None]  # log probability, token id, text


class FinishReason(BaseModel):
    """`length`: of the output, in tokens. `matched`: the stop string or token."""

    type: Literal["stop", "length", "abort"]
    length: int | None = None
    matched: int | str | None = None


class MetaInfo(BaseModel):
    """`finish_reason`: null in an event that is not the last one. `e2e_latency`: seconds."""

    id: str
    finish_reason: FinishReason | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    e2e_latency: float | None = None
    input_token_logprobs: list[Entry] | None = None
    output_token_logprobs: list[Entry] | None = None
    input_top_logprobs: list[list[Entry] | None] | None = None
    output_top_logprobs: list[list[Entry]] | None = None


class Generated(BaseModel):
    """`index`: in an event, of the choice in a batch."""

    text: str
    output_ids: list[int]
    meta_info: MetaInfo
    index: int | None = None


_EVENTS = "Events, each with the whole output so far, or an error; the last one is `[DONE]`."
GENERATE_RESPONSE: dict[str, Any] = {
    "model": Generated | list[Generated],
    "description": "The output; of a batch, or with n over 1, a list.",
    "content": {"text/event-stream": {"schema": {"type": "string", "description": _EVENTS}}},
}
