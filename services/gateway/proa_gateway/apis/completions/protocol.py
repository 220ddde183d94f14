"""The bodies of `/v1/completions`."""

from typing import Literal

from pydantic import BaseModel

from proa_gateway.errors import InvalidRequest
from proa_gateway.serving.beam_search import BeamSearchFields, check_beam_search
from proa_gateway.serving.envelope import Chunk, PromptLogprobs, Response, ResponseChoice
from proa_gateway.serving.fields import Count, NumLogprobs, Prompts
from proa_gateway.serving.generation_request import GenerationRequest, check_max_tokens


class CompletionRequest(BeamSearchFields, GenerationRequest):
    """`POST /v1/completions`."""

    prompt: Prompts
    echo: bool | None = None
    logprobs: NumLogprobs | None = None
    best_of: Count | None = None

    def check(self) -> None:
        check_max_tokens(self.max_tokens, echo=bool(self.echo))
        num_choices = self.n or 1
        if (self.best_of or num_choices) != num_choices:
            raise InvalidRequest("best_of is only supported where it equals n.", param="best_of")
        if self.use_beam_search:
            check_max_tokens(self.max_tokens)
            check_beam_search(self)


class CompletionLogprobLists(BaseModel):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChunkChoice(ResponseChoice):
    text: str
    logprobs: CompletionLogprobLists | None
    prompt_token_ids: list[int] | None = None


class CompletionChoice(CompletionChunkChoice):
    prompt_logprobs: list[PromptLogprobs | None] | None


class Completion(Response):
    """A completion that is not streamed."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class CompletionChunk(Chunk):
    """An event of a streamed completion."""

    object: Literal["text_completion"]
    choices: list[CompletionChunkChoice]
