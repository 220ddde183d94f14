"""ConversationHandler: the part of an `EndpointHandler` that is the same for all APIs of chats."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from proa.chat_template import ChatTemplate, ChatTemplateError
from proa.contract import SamplingParams
from proa.text import TextStream
from proa_gateway.engines.model_registry import ServedModel
from proa_gateway.errors import InvalidRequest, UnsupportedField
from proa_gateway.openai.chat_prompt import render_prompt, unused_variables
from proa_gateway.openai.conversation import Conversation
from proa_gateway.openai.envelope import Prompt
from proa_gateway.openai.protocol import GenerationRequest
from proa_gateway.openai.sampling import check_max_tokens, num_logprobs, sampling_params, text_stream, truncated
from proa_gateway.openai.tools import check_tools


class ConversationHandler:
    """A subclass adds what is left of `EndpointHandler`: the class variables, `session_id` and `answer`."""

    num_prompts = 1

    def __init__(
        self,
        request: GenerationRequest,
        conversation: Conversation,
        *,
        max_tokens: int | None = None,
        logprobs: int | None = None,
        trusts_template: bool = False,
        on_ignored: Callable[[Sequence[str]], None] | None = None,
    ) -> None:
        """`max_tokens` None: up to the end of the context. `logprobs`: likeliest tokens in log probabilities, None: no
        log probabilities. `trusts_template`: whether requests may bring a chat template. `on_ignored` is called with
        the paths of ignored fields, before the response starts."""
        self._request = request
        self.conversation = conversation
        self._max_tokens = max_tokens
        self._logprobs = logprobs
        self._on_ignored = on_ignored
        self._trusts_template = trusts_template

    @property
    def request(self) -> GenerationRequest:
        return self._request

    @property
    def extra_fields(self) -> Mapping[str, Any]:
        return self._request.extra_fields

    def validate(self) -> None:
        check_max_tokens(self._request.max_tokens)
        if self.conversation.continues_message and self.conversation.opens_message:
            message = "add_generation_prompt and continue_final_message cannot both be true."
            raise InvalidRequest(message, param="add_generation_prompt")
        if self.conversation.chat_template is not None and not self._trusts_template:
            message = "chat_template is not supported: the gateway runs without --trust-request-chat-template."
            raise UnsupportedField(message, param="chat_template")
        check_tools(self.conversation.tools, self.conversation.tool_choice)

    def sampling_params(self, model: ServedModel) -> list[SamplingParams]:
        if self.conversation.prompt_tools:
            message = f"tools is not supported: the format in which {model.name!r} writes calls is not known."
            raise UnsupportedField(message, param="tools")
        return sampling_params(
            self._request,
            model,
            max_tokens=self._max_tokens,
            logprobs=num_logprobs("top_logprobs", self._logprobs, model.info),
            prompt_logprobs=self._request.prompt_logprobs,
        )

    async def tokenize(self, model: ServedModel) -> list[Prompt]:
        template = self._template(model)
        text = render_prompt(self.conversation, template)
        if self._on_ignored is not None:
            self._on_ignored(unused_variables(self.conversation, template))
        # The text has its special tokens already: the template writes them.
        special = self._request.add_special_tokens or False
        token_ids = await model.tokenizer.encode(text, add_special_tokens=special)
        kept = truncated(token_ids, self._request, model, max_tokens=self._max_tokens)
        return [Prompt(kept, text if len(kept) == len(token_ids) else model.tokenizer.decode(kept))]

    def text_stream(self, prompt: Prompt, model: ServedModel) -> TextStream | None:
        return text_stream(self._request, model)

    def _template(self, model: ServedModel) -> ChatTemplate:
        source = self.conversation.chat_template
        if source is not None:
            try:
                return model.tokenizer.compile_template(source)
            except ChatTemplateError as error:
                raise InvalidRequest(f"chat_template: {error}", param="chat_template") from error
        template = model.tokenizer.template_for(tools=bool(self.conversation.prompt_tools))
        if template is None:
            raise InvalidRequest(f"The model {model.name!r} has no chat template: use /v1/completions.", param="model")
        return template
