"""Chat completions: the prompt is a conversation, and choices are messages. A batch has several conversations."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from proa_gateway.apis.chat.protocol import BatchChatCompletionRequest, ChatCompletionRequest
from proa_gateway.apis.chat.render import BatchRenderer, ChatRenderer
from proa_gateway.engines.models import ServedModel
from proa_gateway.errors import InvalidRequest
from proa_gateway.serving.beam_search import beam_search_job
from proa_gateway.serving.conversation import Conversation
from proa_gateway.serving.conversation_call import ConversationCall, ConversationReader
from proa_gateway.serving.generation_job import GenerationCall, GenerationJob
from proa_gateway.serving.ignored_fields import REFUSED_IN_CHAT
from proa_gateway.serving.job import ApiSettings, Endpoint
from proa_gateway.serving.tools.offers import offered_fields

CHAT = Endpoint("/v1/chat/completions", "chat", "chatcmpl-", REFUSED_IN_CHAT)
BATCH = replace(CHAT, route="/v1/chat/completions/batch")


def chat_call(body: ChatCompletionRequest, settings: ApiSettings, *, param: str = "messages") -> ConversationCall:
    """Make the call of a chat completion. `param`: path of the conversation in the body, for errors. Raises
    `InvalidRequest`."""
    kind = BeamSearchChatCall if body.use_beam_search else ConversationCall
    return kind(
        endpoint=CHAT,
        fields=body,
        session_id=body.session_id or body.prompt_cache_key or body.user,
        extra_fields=body.extra_fields | offered_fields(body.tools) if body.tools else body.extra_fields,
        settings=settings,
        reader=ConversationReader(
            conversation=conversation_of(body),
            request=body,
            settings=settings,
            param=param,
            max_tokens=body.max_completion_tokens or body.max_tokens,
        ),
        renderer=lambda chat: partial(ChatRenderer, body, chat, settings),
        logprobs=body.top_logprobs or 0 if body.logprobs else None,
        continuous_usage=settings.includes_usage or body.continuous_usage,
    )


@dataclass(frozen=True, kw_only=True)
class BeamSearchChatCall(ConversationCall):
    fields: ChatCompletionRequest

    async def prepare(self, model: ServedModel) -> GenerationJob:
        return beam_search_job(await ConversationCall.prepare(self, model), self.fields, model)


def conversation_of(request: ChatCompletionRequest) -> Conversation:
    """Return the request's conversation. Raises `InvalidRequest`."""
    budget = request.thinking_token_budget
    return replace(
        request.conversation(request.messages),
        parallel_tool_calls=request.parallel_tool_calls is not False,
        includes_reasoning=request.include_reasoning is not False,
        separates_reasoning=request.separate_reasoning is not False,
        thinking_token_budget=None if budget == -1 else budget,
    )


@dataclass(frozen=True, kw_only=True)
class BatchCall(GenerationCall):
    """vLLM's batches of chats: the conversations are prompts of one request, and the response has a choice for each."""

    chats: Sequence[ConversationCall]  # each with one prompt

    def check(self) -> None:
        GenerationCall.check(self)
        if self.num_choices > 1:
            raise InvalidRequest("n must be 1 in a batch: each conversation has one choice.", param="n")
        if self.is_streamed:
            raise InvalidRequest("A batch cannot be streamed.", param="stream")
        for chat in self.chats:
            chat.check()

    async def prepare(self, model: ServedModel) -> GenerationJob:
        jobs = [await chat.prepare(model) for chat in self.chats]
        first = jobs[0]
        if any(job.constraint != first.constraint for job in jobs):
            message = "Some conversations of the batch end within reasoning, others do not: send them apart."
            raise InvalidRequest(message, param="messages")
        prompts = [prompt for job in jobs for prompt in job.prompts]
        renderer = partial(BatchRenderer, model.name, [job.renderer for job in jobs])
        warnings = list(dict.fromkeys(warning for job in jobs for warning in job.warnings))
        return replace(first, prompts=prompts, renderer=renderer, warnings=warnings)


def batch_call(body: BatchChatCompletionRequest, settings: ApiSettings) -> BatchCall:
    """Make the call of a batch of chats. Raises `InvalidRequest`."""
    chats = [chat_call(chat, settings, param=f"messages[{index}]") for index, chat in enumerate(body.chats)]
    return BatchCall(
        endpoint=BATCH,
        fields=body,
        session_id=chats[0].session_id,
        extra_fields=body.extra_fields | offered_fields(body.tools or ()),
        settings=settings,
        num_prompts=len(chats),
        chats=chats,
    )
