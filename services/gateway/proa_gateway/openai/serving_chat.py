"""Chat completions: the model's chat template turns messages into one prompt, and choices are messages."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from proa.chat_template import ChatTemplateError
from proa.contract import SamplingParams
from proa.text import TextStream
from proa_gateway.engines.model_registry import ServedModel
from proa_gateway.errors import InvalidRequest
from proa_gateway.openai.protocol import ChatCompletionRequest, ChatMessage
from proa_gateway.openai.refused_fields import REFUSED_IN_CHAT, Refused
from proa_gateway.openai.rendering import ChatChoice, Choice, Envelope, Prompt, prompt_fields
from proa_gateway.openai.sampling import check_logprobs, check_max_tokens, sampling_params, text_stream
from proa_gateway.output_processor import Delta


class ChatHandler:
    """The `EndpointHandler` of `/v1/chat/completions`."""

    route: ClassVar[str] = "/v1/chat/completions"
    operation: ClassVar[str] = "chat"
    id_prefix: ClassVar[str] = "chatcmpl-"
    prompt_param: ClassVar[str] = "messages"
    refused: ClassVar[Mapping[str, Refused]] = REFUSED_IN_CHAT
    num_prompts = 1

    def __init__(self, request: ChatCompletionRequest) -> None:
        self.request = request

    @property
    def session_id(self) -> str | None:
        return self.request.session_id or self.request.prompt_cache_key or self.request.user

    def validate(self) -> None:
        check_max_tokens(self.request.max_tokens)
        if self.request.top_logprobs and not self.request.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs to be true.", param="top_logprobs")

    def sampling_params(self, model: ServedModel) -> list[SamplingParams]:
        request = self.request
        check_logprobs("top_logprobs", request.top_logprobs, model.info)
        return sampling_params(
            request,
            model,
            max_tokens=request.max_completion_tokens or request.max_tokens,
            logprobs=(request.top_logprobs or 0) if request.logprobs else None,
            prompt_logprobs=request.prompt_logprobs,
        )

    async def tokenize(self, model: ServedModel) -> list[Prompt]:
        request = self.request
        if model.tokenizer.chat_template is None:
            raise InvalidRequest(f"The model {model.name!r} has no chat template: use /v1/completions.", param="model")
        try:
            text = model.tokenizer.chat_template.render(
                [_template_message(message) for message in request.messages],
                request.chat_template_kwargs,
                add_generation_prompt=request.add_generation_prompt is not False,
            )
        except ChatTemplateError as error:
            raise InvalidRequest(
                f"The model's chat template refuses the messages: {error}", param="messages"
            ) from error
        # The text has its special tokens already: the template writes them.
        token_ids = await model.tokenizer.encode(text, add_special_tokens=request.add_special_tokens or False)
        return [Prompt(token_ids, text)]

    def envelope(self, id: str, created: int, model: str) -> Envelope:
        name = "chat.completion.chunk" if self.request.stream else "chat.completion"
        return Envelope(id=id, object=name, created=created, model=model, include_usage=self.request.include_usage)

    def choice(self, envelope: Envelope, index: int, prompt: Prompt, model: ServedModel) -> Choice:
        return ChatChoice(
            envelope,
            index,
            model.tokenizer.vocabulary,
            logprobs=bool(self.request.logprobs),
            token_ids=bool(self.request.return_token_ids),
        )

    def text_stream(self, prompt: Prompt, model: ServedModel) -> TextStream | None:
        return text_stream(self.request, model)

    @property
    def wants_tokens(self) -> bool:
        request = self.request
        return bool(request.logprobs or request.return_token_ids) or request.prompt_logprobs is not None

    def response_fields(
        self, prompts: Sequence[Prompt], results: Sequence[Delta], model: ServedModel
    ) -> dict[str, Any]:
        return prompt_fields(
            prompts[0],
            results[0],
            model.tokenizer.vocabulary,
            logprobs=self.request.prompt_logprobs is not None,
            token_ids=bool(self.request.return_token_ids),
        )


def _template_message(message: ChatMessage) -> dict[str, Any]:
    """The message as templates expect it: `developer` is OpenAI's newer name of `system`."""
    role = "system" if message.role == "developer" else message.role
    fields = {"role": role, "content": message.content or ""}
    if message.name is not None:
        fields["name"] = message.name
    return {**(message.model_extra or {}), **fields}
