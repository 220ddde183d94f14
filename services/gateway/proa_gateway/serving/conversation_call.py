"""Requests of the APIs of chats. `ConversationReader` makes the prompt, `ConversationCall` the job.

An API of chats brings a `Conversation`, its sampling fields by OpenAI's names, and the renderer of the response.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from proa.chat_template import ChatTemplate, ChatTemplateError, ChatTemplateTooCostly
from proa.contract import SamplingParams
from proa.fit_messages import call_text, fit_messages
from proa.template_rules import Message
from proa_gateway.engines.models import ServedModel
from proa_gateway.errors import InvalidRequest, UnsupportedField
from proa_gateway.parsing.grammars.message import Reasoning
from proa_gateway.serving.chat_prompt import fit_reasoning, generation_prompt, render_prompt, template_messages
from proa_gateway.serving.choices import Prompt
from proa_gateway.serving.constraints import BUDGET, NO_BUDGET, MessageConstraint, OutputConstraint
from proa_gateway.serving.conversation import Conversation, ReasoningFields
from proa_gateway.serving.generation_job import GenerationCall, GenerationJob, MakeRenderer
from proa_gateway.serving.generation_request import (
    GenerationRequest,
    check_max_tokens,
    num_logprobs,
    sampling_params,
    text_stream,
)
from proa_gateway.serving.job import ApiSettings
from proa_gateway.serving.message_format import MessageFormat, ModelFormat
from proa_gateway.serving.plain_text import plain_conversation
from proa_gateway.serving.prompt import (
    MAX_COUNTED_TOKENS,
    NO_MEDIA,
    check_text_fits,
    cut_text,
    load_media,
    media_parts,
    truncated,
)
from proa_gateway.serving.structured_outputs import Constraint
from proa_gateway.serving.tools.described import DESCRIBED, UNKNOWN, describe_tools, hermes_call
from proa_gateway.serving.tools.tool import check_tools
from proa_gateway.tokenizer import MARK


@dataclass(frozen=True, slots=True)
class ReadConversation:
    """A conversation as the prompt for one model."""

    prompt: Prompt
    conversation: Conversation  # with the reasoning fields that the model's template uses
    ignored_fields: Sequence[str]  # paths of those that it does not use
    warnings: Sequence[str]  # about what was changed for the template


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationReader:
    """Makes the prompt of a conversation."""

    conversation: Conversation
    request: GenerationRequest  # for its fields about tokens
    settings: ApiSettings
    param: str = "messages"  # path of the messages in the body, for errors
    max_tokens: int | None = None  # of the output, for which truncation leaves room
    reasoning_fields: ReasoningFields = field(default_factory=ReasoningFields)  # that the API's body has

    def check(self) -> None:
        """Check what needs no model. Raises `InvalidRequest`."""
        conversation = self.conversation
        check_max_tokens(self.request.max_tokens)
        if conversation.continues_message and conversation.opens_message:
            message = "add_generation_prompt and continue_final_message cannot both be true."
            raise InvalidRequest(message, param="add_generation_prompt")
        if conversation.chat_template is not None and not self.settings.trusts_template:
            message = "chat_template is not supported: the gateway runs without --trust-request-chat-template."
            raise UnsupportedField(message, param="chat_template")
        if conversation.tools or conversation.tool_choice not in ("none", "auto"):
            check_tools(conversation.tools, conversation.tool_choice, conversation.left_out_tools)
        if conversation.prompt_tools and not conversation.separates_reasoning:
            message = "separate_reasoning is not supported with tools: the answer is then always parsed."
            raise UnsupportedField(message, param="separate_reasoning")

    async def count(self, model: ServedModel) -> Sequence[int]:
        """The token ids of a prompt that no engine gets. Raises `InvalidRequest`."""
        self.check()
        read = await self.read(model, limit=max(MAX_COUNTED_TOKENS, model.info.max_model_len))
        return read.prompt.token_ids

    async def read(
        self, model: ServedModel, model_format: ModelFormat | None = None, *, limit: int | None = None
    ) -> ReadConversation:
        """`model_format` None: no output is parsed. `limit`: tokens of the prompt; None: those of the model's context.
        Raises `InvalidRequest`, `Overloaded`."""
        template, settings, request = await self._template(model), self.settings, self.request
        variables = self.conversation.template_kwargs
        ignored = [f"chat_template_kwargs.{name}" for name in variables if name not in template.variables]
        fitted = fit_reasoning(self.conversation, template, self.reasoning_fields)
        conversation = fitted.conversation
        parts = list(media_parts(conversation.messages, self.param))
        media = await load_media(parts, model, settings.images, settings.audios, param=self.param) if parts else None
        written = plain_conversation(conversation, model.tokenizer) if settings.plain_texts else conversation
        messages, changes = self._messages(written, template, model)
        placeholder = media.input.placeholder if media is not None else ""
        renderer, content_format = model.tokenizer.templates, settings.content_format
        text = await self._rendered(
            model, render_prompt(written, messages, template, renderer, content_format, placeholder=placeholder)
        )
        # The text has its special tokens already: the template writes them.
        special = request.add_special_tokens or False
        expanded = media.expand(text) if media is not None else text
        if request.truncate_prompt_tokens is None:
            await check_text_fits(expanded, model, limit or model.info.max_model_len, self.param)
        elif media is None:
            expanded = cut_text(expanded, request, model)
        if settings.plain_texts:
            token_ids = await model.tokenizer.encode_marked(expanded, add_special_tokens=special)
            expanded = expanded.replace(MARK, "")
        else:
            token_ids = await model.tokenizer.encode(expanded, add_special_tokens=special)
        placed = media.place(token_ids) if media is not None else NO_MEDIA
        kept: Sequence[int] = token_ids
        if request.truncate_prompt_tokens is not None:
            kept = truncated(token_ids, request, model, max_tokens=self.max_tokens)
        if len(kept) < len(token_ids):
            expanded = await model.tokenizer.detokenize(kept)
            placed = placed.kept(len(token_ids), len(kept), request.truncation_side or "left")
        message_format = None
        if model_format is not None:
            added_text = partial(
                generation_prompt, written, messages, template, renderer, text, content_format, placeholder=placeholder
            )
            message_format = await self._message_format(model_format, lambda: self._rendered(model, added_text()))
        prompt = Prompt(kept, expanded, placed.images, message_format, audios=placed.audios)
        return ReadConversation(prompt, conversation, [*fitted.unused_fields, *ignored], [*fitted.warnings, *changes])

    def _messages(
        self, conversation: Conversation, template: ChatTemplate, model: ServedModel
    ) -> tuple[Sequence[Message], Sequence[str]]:
        """Return the messages as the template reads them, and warnings about what was changed."""
        messages, warnings, write_call = template_messages(conversation.messages), [], call_text
        if conversation.prompt_tools:
            knows_calls = self.settings.formats.for_tools(model).has_calls
            if "tools" not in template.variables:
                messages = describe_tools(messages, conversation.prompt_tools, shows_form=not knows_calls)
                warnings.append(DESCRIBED)
                write_call = call_text if knows_calls else hermes_call
            elif not knows_calls and conversation.tool_choice == "auto":
                warnings.append(UNKNOWN)
        fitted, changes = fit_messages(messages, template.rules, write_call=write_call)
        return fitted, [*warnings, *changes]

    async def _rendered(self, model: ServedModel, prompt: Awaitable[str]) -> str:
        """Raises `InvalidRequest` for a template that takes too long or too much memory."""
        try:
            return await prompt
        except ChatTemplateTooCostly as error:
            if self.conversation.chat_template is not None:
                raise InvalidRequest(f"chat_template was stopped: {error}.", param="chat_template") from error
            message = f"The chat template of the model {model.name!r} was stopped: {error}."
            raise InvalidRequest(message, param=self.param) from error

    async def _message_format(
        self, model_format: ModelFormat, added_text: Callable[[], Awaitable[str]]
    ) -> MessageFormat | None:
        """Return how the outputs are parsed, None if they are not. `added_text` returns the end of the prompt that
        begins the answer."""
        conversation = self.conversation
        separates_reasoning = model_format.tool_format.has_reasoning and conversation.separates_reasoning
        if not conversation.prompt_tools and not separates_reasoning:
            return None
        has_tags = model_format.tool_format.reasoning is not None
        return model_format.for_request(
            conversation.prompt_tools,
            model_format.reasoning_after((await added_text()).replace(MARK, "")) if has_tags else Reasoning.CLOSED,
            parallel_calls=conversation.parallel_tool_calls,
            constrains_content=self.request.constraint is not None,
        )

    async def _template(self, model: ServedModel) -> ChatTemplate:
        source = self.conversation.chat_template
        if source is not None:
            try:
                return await model.tokenizer.templates.compile(source)
            except ChatTemplateError as error:
                raise InvalidRequest(f"chat_template: {error}", param="chat_template") from error
        template = model.tokenizer.template_for(tools=bool(self.conversation.prompt_tools))
        if template is None and (reason := model.tokenizer.template_error):
            message = f"The chat template of the model {model.name!r} cannot be used: {reason}"
            raise InvalidRequest(message, param="model")
        if template is None:
            raise InvalidRequest(f"The model {model.name!r} has no chat template: use /v1/completions.", param="model")
        return template


@dataclass(frozen=True, slots=True)
class PreparedChat:
    """The parts of a conversation's job that a renderer needs."""

    model: ServedModel
    prompt: Prompt
    params: SamplingParams  # with the model's defaults


@dataclass(frozen=True, kw_only=True)
class ConversationCall(GenerationCall):
    """A request for the answer to a conversation."""

    reader: ConversationReader
    renderer: Callable[[PreparedChat], MakeRenderer]  # makes the renderer's factory once the prompt is known
    param: str = "messages"  # the body's field that has the prompt, for errors
    logprobs: int | None = None  # how many likeliest tokens log probabilities have; None: there are none
    continuous_usage: bool = False  # every event of a stream has the usage

    def check(self) -> None:
        GenerationCall.check(self)
        self.reader.check()

    async def prepare(self, model: ServedModel) -> GenerationJob:
        params = sampling_params(
            self.fields,
            model,
            max_tokens=self.reader.max_tokens,
            logprobs=num_logprobs("top_logprobs", self.logprobs, model.info),
            prompt_logprobs=self.fields.prompt_logprobs,
        )
        formats, has_tools = self.settings.formats, bool(self.reader.conversation.prompt_tools)
        model_format = formats.for_tools(model) if has_tools else formats.of(model)
        read = await self.reader.read(model, model_format)
        return GenerationJob(
            request=self.fields,
            param=self.param,
            prompts=[read.prompt],
            ignored_fields=read.ignored_fields,
            warnings=read.warnings,
            constraint=_output_constraint(self.fields.constraint, read),
            params=params,
            text_stream=lambda prompt: text_stream(self.fields, model),
            renderer=self.renderer(PreparedChat(model, read.prompt, params[0])),
            continuous_usage=self.continuous_usage,
        )


def _output_constraint(content: Constraint | None, read: ReadConversation) -> OutputConstraint | None:
    """`content`: of the content. None: nothing is constrained. Raises `UnsupportedField`."""
    conversation, message_format = read.conversation, read.prompt.message_format
    if message_format is None:
        if conversation.thinking_token_budget is not None:
            raise UnsupportedField(NO_BUDGET, param=BUDGET)
        return OutputConstraint(content) if content is not None else None
    message = MessageConstraint(
        message_format.compiled.tool_format,
        conversation.prompt_tools,
        "auto" if conversation.tool_choice == "none" else conversation.tool_choice,
        conversation.parallel_tool_calls,
        message_format.reasoning,
        conversation.thinking_token_budget,
    )
    return OutputConstraint(content, message) if content is not None or message.constrains else None
