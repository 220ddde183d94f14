"""Request bodies: OpenAI's fields and vLLM's extra ones.

Unknown fields are ignored, as OpenAI does. Known fields that would change the output but are not supported are
rejected by name.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from proa_gateway.openai.fields import (
    Content,
    LogitBias,
    OnlyText,
    Prompts,
    Strings,
    TemplateValue,
    TemplateVariables,
    Text,
    ToolChoice,
    Unsupported,
)

Probability = Annotated[float, Field(ge=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Count = Annotated[int, Field(ge=1, lt=2**31)]
TokenIds = list[Annotated[int, Field(ge=0, lt=2**31)]]


class StreamOptions(BaseModel):
    """`include_usage`: usage in a last event. `continuous_usage_stats`: the usage so far in every event."""

    model_config = ConfigDict(strict=True)

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationRequest(BaseModel):
    """The fields that all generation endpoints have. None: the default; for sampling parameters the model's."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, protected_namespaces=())

    model: str | None = Field(None, description="May be omitted if only one model is served.")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Count | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: Strings | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: LogitBias | None = None
    max_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None

    user: Annotated[str, Field(max_length=256)] | None = None

    # vLLM's extra fields
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Probability | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=1000)] | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    allowed_token_ids: Annotated[TokenIds, Field(min_length=1)] | None = None
    bad_words: Strings | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=1000)] | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    cache_salt: Annotated[str, Field(max_length=256)] | None = None
    return_token_ids: bool | None = None

    use_beam_search: Unsupported = None
    response_format: OnlyText = None
    structured_outputs: Unsupported = None
    guided_json: Unsupported = None
    guided_regex: Unsupported = None
    guided_choice: Unsupported = None
    guided_grammar: Unsupported = None
    truncate_prompt_tokens: Unsupported = None
    logits_processors: Unsupported = None
    logprob_token_ids: Unsupported = None
    kv_transfer_params: Unsupported = None

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with an event that has the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)


class ChatMessage(BaseModel):
    """A message. Other fields are passed to the chat template unchanged."""

    model_config = ConfigDict(strict=True, extra="allow")
    __pydantic_extra__: dict[str, TemplateValue]

    role: Literal["system", "developer", "user", "assistant"]
    content: Content = None
    name: Text | None = None
    tool_calls: Unsupported = None
    function_call: ToolChoice = None
    audio: Unsupported = None


class ChatCompletionRequest(GenerationRequest):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=1000)] | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: TemplateVariables | None = None

    tools: Unsupported = None
    tool_choice: ToolChoice = None
    functions: Unsupported = None
    function_call: ToolChoice = None
    modalities: OnlyText = None
    audio: Unsupported = None
    web_search_options: Unsupported = None
    echo: Unsupported = None
    chat_template: Unsupported = None
    documents: Unsupported = None
    continue_final_message: Unsupported = None
    thinking_token_budget: Unsupported = None


class CompletionRequest(GenerationRequest):
    """`POST /v1/completions`."""

    prompt: Prompts
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=1000)] | None = None
    best_of: Count | None = None

    suffix: Unsupported = None
    prompt_embeds: Unsupported = None
