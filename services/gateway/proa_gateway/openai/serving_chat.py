"""Chat completions: the model's chat template turns messages into one prompt, and choices are messages."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from proa.chat_template import ChatTemplate, ChatTemplateError
from proa.contract import SamplingParams
from proa.text import TextStream
from proa_gateway.engines.model_registry import ServedModel
from proa_gateway.errors import InvalidRequest, UnsupportedField
from proa_gateway.openai.chat_prompt import echoed_text, render_prompt, response_role, unused_variables
from proa_gateway.openai.envelope import Envelope, Prompt
from proa_gateway.openai.protocol import ChatCompletionRequest
from proa_gateway.openai.refused_fields import REFUSED_IN_CHAT, Refused
from proa_gateway.openai.rendering import ChatChoice, Choice, prompt_fields
from proa_gateway.openai.sampling import check_max_tokens, num_logprobs, sampling_params, text_stream, truncated
from proa_gateway.output_processor import Delta


class ChatHandler:
    """The `EndpointHandler` of `/v1/chat/completions`."""

    route: ClassVar[str] = "/v1/chat/completions"
    operation: ClassVar[str] = "chat"
    id_prefix: ClassVar[str] = "chatcmpl-"
    prompt_param: ClassVar[str] = "messages"
    refused: ClassVar[Mapping[str, Refused]] = REFUSED_IN_CHAT
    num_prompts = 1

    def __init__(
        self,
        request: ChatCompletionRequest,
        *,
        trusts_template: bool,
        on_ignored: Callable[[Sequence[str]], None] | None = None,
    ) -> None:
        """`trusts_template`: whether requests may bring a chat template. `on_ignored` is called with the paths of
        ignored fields, before the response starts."""
        self.request = request
        self._on_ignored = on_ignored
        self._trusts_template = trusts_template

    @property
    def session_id(self) -> str | None:
        return self.request.session_id or self.request.prompt_cache_key or self.request.user

    def validate(self) -> None:
        check_max_tokens(self.request.max_tokens)
        if self.request.top_logprobs and not self.request.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs to be true.", param="top_logprobs")
        if self.request.continue_final_message and self.request.add_generation_prompt:
            message = "add_generation_prompt and continue_final_message cannot both be true."
            raise InvalidRequest(message, param="add_generation_prompt")
        if self.request.chat_template is not None and not self._trusts_template:
            message = "chat_template is not supported: the gateway runs without --trust-request-chat-template."
            raise UnsupportedField(message, param="chat_template")

    def sampling_params(self, model: ServedModel) -> list[SamplingParams]:
        request = self.request
        num_top = num_logprobs("top_logprobs", request.top_logprobs, model.info)
        return sampling_params(
            request,
            model,
            max_tokens=self._max_tokens,
            logprobs=(num_top or 0) if request.logprobs else None,
            prompt_logprobs=request.prompt_logprobs,
        )

    async def tokenize(self, model: ServedModel) -> list[Prompt]:
        request = self.request
        template = self._template(model)
        text = render_prompt(request, template)
        if self._on_ignored is not None:
            self._on_ignored(unused_variables(request, template))
        # The text has its special tokens already: the template writes them.
        token_ids = await model.tokenizer.encode(text, add_special_tokens=request.add_special_tokens or False)
        kept = truncated(token_ids, request, model, max_tokens=self._max_tokens)
        return [Prompt(kept, text if len(kept) == len(token_ids) else model.tokenizer.decode(kept))]

    def envelope(self, id: str, created: int, model: str) -> Envelope:
        name = "chat.completion.chunk" if self.request.stream else "chat.completion"
        return Envelope(id=id, object=name, created=created, model=model, include_usage=self.request.include_usage)

    def choice(self, envelope: Envelope, index: int, prompt: Prompt, model: ServedModel) -> Choice:
        request, vocabulary = self.request, model.tokenizer.vocabulary
        opening: dict[str, object] = {}
        if index == 0 and request.return_token_ids:
            opening["prompt_token_ids"] = list(prompt.token_ids)
        if index == 0 and request.return_prompt_text:
            opening["prompt_text"] = prompt.text
        return ChatChoice(
            envelope,
            index,
            vocabulary,
            role=response_role(request),
            echo=echoed_text(request),
            logprobs=request.token_names(vocabulary) if request.logprobs else None,
            token_ids=bool(request.return_token_ids),
            opening_fields=opening,
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
        fields = prompt_fields(
            prompts[0],
            results[0],
            model.tokenizer.vocabulary,
            logprobs=self.request.prompt_logprobs is not None,
            token_ids=bool(self.request.return_token_ids),
        )
        return fields | {"prompt_text": prompts[0].text if self.request.return_prompt_text else None}

    @property
    def _max_tokens(self) -> int | None:
        return self.request.max_completion_tokens or self.request.max_tokens

    def _template(self, model: ServedModel) -> ChatTemplate:
        if self.request.chat_template is not None:
            try:
                return model.tokenizer.compile_template(self.request.chat_template)
            except ChatTemplateError as error:
                raise InvalidRequest(f"chat_template: {error}", param="chat_template") from error
        if model.tokenizer.chat_template is None:
            raise InvalidRequest(f"The model {model.name!r} has no chat template: use /v1/completions.", param="model")
        return model.tokenizer.chat_template
