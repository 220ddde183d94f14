"""The bodies of `/v1/completions`."""

from typing import Literal

from pydantic import BaseModel

from proa_gateway.serving.fields import Prompts
from proa_gateway.serving.generation_request import Count, GenerationRequest, NumLogprobs
from proa_gateway.serving.openai_schema import TokenLogprobs, _Choice, _Chunk, _Response


class CompletionRequest(GenerationRequest):
    """`POST /v1/completions`."""

    prompt: Prompts
    echo: bool | None = None
    logprobs: NumLogprobs | None = None
    best_of: Count | None = None


class CompletionLogprobLists(BaseModel):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChunkChoice(_Choice):
    text: str
    logprobs: CompletionLogprobLists | None
    prompt_token_ids: list[int] | None = None


class CompletionChoice(CompletionChunkChoice):
    prompt_logprobs: list[TokenLogprobs | None] | None


class Completion(_Response):
    """A completion that is not streamed."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class CompletionChunk(_Chunk):
    """An event of a streamed completion."""

    object: Literal["text_completion"]
    choices: list[CompletionChunkChoice]
