"""The bodies of `/v1/completions`."""

from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel, Field

from proa_gateway.errors import InvalidRequest, MissingField, UnsupportedField
from proa_gateway.serving.beam_search import BeamSearchFields, check_beam_search
from proa_gateway.serving.envelope import Chunk, PromptLogprobs, Response, ResponseChoice
from proa_gateway.serving.fields import Count, NumLogprobs, Prompts, Strings
from proa_gateway.serving.generation_request import GenerationRequest, check_max_tokens


class CompletionRequest(BeamSearchFields, GenerationRequest):
    """`POST /v1/completions`."""

    prompt: Prompts = Field(default_factory=list)
    prompt_embeds: Strings | None = Field(
        None, description="Base64 of tensors as `torch.save` writes them, [tokens, hidden size]; before `prompt`."
    )
    echo: bool | None = None
    logprobs: NumLogprobs | None = None
    best_of: Count | None = None

    @property
    def texts(self) -> Sequence[str | list[int]]:
        """The prompts that are no embeddings. With embeddings an empty one means none, since OpenAI's client must send
        one."""
        return [] if self.prompt_embeds and self.prompt == [""] else self.prompt

    def check(self) -> None:
        if not self.prompt and not self.prompt_embeds:
            raise MissingField("prompt: Field required", param="prompt")
        if self.prompt_embeds:
            self._check_embeds()
        check_max_tokens(self.max_tokens, echo=bool(self.echo))
        num_choices = self.n or 1
        if (self.best_of or num_choices) != num_choices:
            raise InvalidRequest("best_of is only supported where it equals n.", param="best_of")
        if self.use_beam_search:
            check_max_tokens(self.max_tokens)
            check_beam_search(self)

    def _check_embeds(self) -> None:
        """Check that all fields can be used with embeddings. Raises `UnsupportedField`."""
        for name in ("echo", "prompt_logprobs", "truncate_prompt_tokens", "use_beam_search"):
            if getattr(self, name) not in (None, False):
                raise UnsupportedField(f"{name} is not supported with prompt_embeds.", param=name)


class CompletionLogprobLists(BaseModel):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]  # characters of the text before each token


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
