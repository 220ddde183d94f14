"""ConversationHandler: the part of an `EndpointHandler` that is the same for all APIs of chats."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from proa.chat_template import ChatTemplate, ChatTemplateError
from proa.contract import SamplingParams
from proa.text import TextStream
from proa_gateway.engines.model_registry import ServedModel
from proa_gateway.errors import InvalidRequest, UnsupportedField
from proa_gateway.images.loader import ImageLoader
from proa_gateway.parsing.grammar import Reasoning
from proa_gateway.serving.chat_prompt import fit_reasoning, generation_prompt, render_prompt, unused_variables
from proa_gateway.serving.content import ContentFormat
from proa_gateway.serving.conversation import Conversation
from proa_gateway.serving.envelope import Prompt
from proa_gateway.serving.generation_request import GenerationRequest
from proa_gateway.serving.message_constraint import BUDGET, NO_BUDGET, MessageConstraint
from proa_gateway.serving.message_format import MessageFormat, MessageFormats, has_reasoning
from proa_gateway.serving.plain_text import plain_conversation
from proa_gateway.serving.prompt_images import image_parts, images_kept, load_images
from proa_gateway.serving.prompt_text import MAX_COUNTED_TOKENS, check_text_fits, cut_text
from proa_gateway.serving.sampling import check_max_tokens, num_logprobs, sampling_params, text_stream, truncated
from proa_gateway.serving.structured_outputs import constraint_of
from proa_gateway.serving.tools import check_tools
from proa_gateway.tokenizer import MARK


@dataclass(frozen=True, slots=True)
class ConversationSettings:
    """The gateway's part. `trusts_template`: whether requests may bring a chat template. `content_format`: of the
    contents that templates get. `images` None: images are refused. `plain_texts`: special tokens in the texts of
    requests are encoded as text."""

    formats: MessageFormats
    trusts_template: bool = False
    content_format: ContentFormat = "auto"
    images: ImageLoader | None = None
    plain_texts: bool = False


class ConversationHandler:
    """A subclass adds what is left of `EndpointHandler`: the class variables, `session_id` and `answer`."""

    prompt_param: ClassVar[str]
    num_prompts = 1

    def __init__(
        self,
        request: GenerationRequest,
        conversation: Conversation,
        settings: ConversationSettings,
        *,
        max_tokens: int | None = None,
        logprobs: int | None = None,
        on_ignored: Callable[[Sequence[str]], None] | None = None,
    ) -> None:
        """`max_tokens` None: up to the end of the context. `logprobs`: likeliest tokens in log probabilities, None: no
        log probabilities. `on_ignored` is called with the paths of ignored fields, before the response starts."""
        self._request = request
        self.conversation = conversation
        self._max_tokens = max_tokens
        self._logprobs = logprobs
        self._on_ignored = on_ignored
        self._settings = settings
        self.messages_param = self.prompt_param  # of the messages, in errors about their parts

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
        if self.conversation.chat_template is not None and not self._settings.trusts_template:
            message = "chat_template is not supported: the gateway runs without --trust-request-chat-template."
            raise UnsupportedField(message, param="chat_template")
        check_tools(self.conversation.tools, self.conversation.tool_choice)
        if self.conversation.prompt_tools and not self.conversation.separates_reasoning:
            message = "separate_reasoning is not supported with tools: the answer is then always parsed."
            raise UnsupportedField(message, param="separate_reasoning")

    def sampling_params(self, model: ServedModel) -> list[SamplingParams]:
        model_format = self._settings.formats.of(model)
        if self.conversation.prompt_tools and (model_format is None or not model_format.has_calls):
            message = f"tools is not supported: the format of {model.name!r} is unknown; --tool-call-parser names one."
            raise UnsupportedField(message, param="tools")
        return sampling_params(
            self._request,
            model,
            max_tokens=self._max_tokens,
            logprobs=num_logprobs("top_logprobs", self._logprobs, model.info),
            prompt_logprobs=self._request.prompt_logprobs,
        )

    async def tokenize(self, model: ServedModel, *, limit: int | None = None) -> list[Prompt]:
        """`limit`: tokens of the prompt; None: those of the model's context."""
        template = self._template(model)
        parts = image_parts(self.conversation.messages, self.messages_param)
        images = await load_images(parts, model, self._settings.images, param=self.messages_param)
        conversation = self.conversation
        if self._settings.plain_texts:
            conversation = plain_conversation(conversation, model.tokenizer)
        text = render_prompt(conversation, template, self._settings.content_format, placeholder=images.placeholder)
        if self._on_ignored is not None:
            self._on_ignored(unused_variables(self.conversation, template))
        # The text has its special tokens already: the template writes them.
        special = self._request.add_special_tokens or False
        expanded = images.expand(text)
        if self._request.truncate_prompt_tokens is None:
            await check_text_fits(expanded, model, limit or model.info.max_model_len, self.messages_param)
        elif not parts:
            expanded = cut_text(expanded, self._request, model)
        if self._settings.plain_texts:
            token_ids = await model.tokenizer.encode_marked(expanded, add_special_tokens=special)
            expanded, text = expanded.replace(MARK, ""), text.replace(MARK, "")
        else:
            token_ids = await model.tokenizer.encode(expanded, add_special_tokens=special)
        placed = images.place(token_ids)
        kept = truncated(token_ids, self._request, model, max_tokens=self._max_tokens)
        if len(kept) < len(token_ids):
            expanded = await model.tokenizer.detokenize(kept)
            placed = images_kept(placed, len(token_ids), len(kept), self._request.truncation_side or "left")
        return [Prompt(kept, expanded, self._reasoning(model, template, text, images.placeholder), placed)]

    async def count_tokens(self, model: ServedModel) -> int:
        """The tokens of the prompt. Raises `InvalidRequest`."""
        self.validate()
        (prompt,) = await self.tokenize(model, limit=max(MAX_COUNTED_TOKENS, model.info.max_model_len))
        return len(prompt.token_ids)

    def message_format(self, model: ServedModel, prompt: Prompt) -> MessageFormat | None:
        """How the outputs are parsed. None: they are not, all text is content."""
        conversation, model_format = self.conversation, self._settings.formats.of(model)
        if model_format is None:
            return None
        separates_reasoning = has_reasoning(model_format.tool_format) and conversation.separates_reasoning
        if not conversation.prompt_tools and not separates_reasoning:
            return None
        return model_format.for_request(
            conversation.prompt_tools,
            prompt.reasoning,
            parallel_calls=conversation.parallel_tool_calls,
            constrains_content=constraint_of(self._request) is not None,
        )

    def message_constraint(self, model: ServedModel, prompts: Sequence[Prompt]) -> MessageConstraint | None:
        conversation, (prompt,) = self.conversation, prompts
        message_format = self.message_format(model, prompt)
        if message_format is None:
            if conversation.thinking_token_budget is not None:
                raise UnsupportedField(NO_BUDGET, param=BUDGET)
            return None
        return MessageConstraint(
            message_format.compiled.tool_format,
            conversation.prompt_tools,
            "auto" if conversation.tool_choice == "none" else conversation.tool_choice,
            conversation.parallel_tool_calls,
            prompt.reasoning,
            conversation.thinking_token_budget,
        )

    def text_stream(self, prompt: Prompt, model: ServedModel) -> TextStream | None:
        return text_stream(self._request, model)

    def _reasoning(self, model: ServedModel, template: ChatTemplate, prompt: str, placeholder: str) -> Reasoning:
        model_format = self._settings.formats.of(model)
        if model_format is None or model_format.tool_format.reasoning is None:
            return Reasoning.CLOSED
        content_format = self._settings.content_format
        added = generation_prompt(self.conversation, template, prompt, content_format, placeholder=placeholder)
        return model_format.reasoning_after(added)

    def _fit_reasoning(
        self, model: ServedModel, thinking: bool | None, *, thinking_field: str, effort_field: str
    ) -> None:
        """Drop the reasoning fields that the model's template does not use. Call it before `tokenize`."""
        self.conversation, ignored = fit_reasoning(
            self.conversation,
            self._template(model),
            thinking,
            thinking_field=thinking_field,
            effort_field=effort_field,
        )
        if ignored and self._on_ignored is not None:
            self._on_ignored(ignored)

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
