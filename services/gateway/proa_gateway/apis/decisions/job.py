"""What engines get for a decision: one prompt or two for each question, and the tokens of its labels.

The input is computed once. Its tokens, which all prompts begin with, are a request of their own; when the engine has
cached them, the prompts follow, all at a time. A label of several tokens needs another request for each token.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from proa.contract import PoolingParams, PoolingTask
from proa_gateway.apis.decisions.contents import Asked, contents, written
from proa_gateway.apis.decisions.labels import Distribution, LabelReading, Tokens
from proa_gateway.apis.decisions.prompts import PromptMaker, QuestionPrompt, QuestionPrompts
from proa_gateway.apis.decisions.protocol import (
    REFUSED,
    DecisionCallOutput,
    DecisionFunctionCall,
    DecisionItem,
    DecisionMessage,
    DecisionRequest,
)
from proa_gateway.apis.decisions.render import render_decision, render_system_one
from proa_gateway.apis.decisions.system_one import REFUSED_IN_SYSTEM_ONE, SystemOneRequest, images_of
from proa_gateway.engines.models import ServedModel
from proa_gateway.errors import InvalidRequest
from proa_gateway.http.streaming import Content, ResponseWriter
from proa_gateway.pooling.fields import PoolingFields
from proa_gateway.pooling.inputs import PooledInput, check_task
from proa_gateway.pooling.job import MAX_RUNNING, compute
from proa_gateway.pooling.values import numbers
from proa_gateway.serving.choices import Prompt, Usage
from proa_gateway.serving.content import joined
from proa_gateway.serving.conversation import MAX_CALLS, ChatMessage
from proa_gateway.serving.job import ApiCall, ApiSettings, Endpoint, Job, Running

DECISIONS: Final = Endpoint("/v1/decisions", "decide", "dec_", REFUSED)
SYSTEM_ONE: Final = Endpoint("/v1/systemone", "decide", "dec_", REFUSED_IN_SYSTEM_ONE)
_IN_A_TURN = 16  # prompts between two turns of the event loop: 5 ms with 255 options
RenderAnswers = Callable[[Sequence[Distribution], str, Usage], Content]
"""Makes the response from the distribution of each question, the model's name and the usage."""


def decisions_call(body: DecisionRequest, settings: ApiSettings) -> "DecisionCall":
    asked = [question.asked(f"questions[{index}]") for index, question in enumerate(body.questions)]
    messages = list(chat_messages(body.input))
    call = partial(_call, DECISIONS, body, settings, messages, asked, partial(render_decision, body.questions))
    return call(param="input", session_id=body.session_id or body.prompt_cache_key or body.user)


def system_one_call(body: SystemOneRequest, settings: ApiSettings) -> "DecisionCall":
    asked = [question.asked(f"questions.{id}") for id, question in body.questions.items()]
    messages = [_message("user", [written(body.state), *images_of(body.images, "images")])]
    call = partial(_call, SYSTEM_ONE, body, settings, messages, asked, partial(render_system_one, body.questions))
    return call(param="state", session_id=body.session_id or body.user)


def _call(
    endpoint: Endpoint,
    fields: PoolingFields,
    settings: ApiSettings,
    messages: Sequence[ChatMessage],
    asked: Sequence[Asked],
    render: RenderAnswers,
    *,
    param: str,
    session_id: str | None,
) -> "DecisionCall":
    return DecisionCall(
        endpoint=endpoint,
        fields=fields,
        session_id=session_id,
        extra_fields=fields.extra_fields,
        num_prompts=min(sum(len(each.rows) for each in asked), MAX_RUNNING),  # those that run at the same time
        settings=settings,
        messages=messages,
        asked=asked,
        render=render,
        param=param,
    )


def chat_messages(items: Sequence[DecisionItem]) -> Iterator[ChatMessage]:
    """Text and calls of one answer, which are items of their own, become one message. A custom tool is, for the chat
    template, a function with one argument `input`."""
    answer: dict[str, Any] = {}
    for index, item in enumerate(items):
        path = f"input[{index}]"
        is_call = not isinstance(item, (DecisionMessage, DecisionCallOutput))
        if answer and not (is_call and len(answer.get("tool_calls", ())) < MAX_CALLS):
            yield ChatMessage.model_validate(answer)
            answer = {}
        if isinstance(item, DecisionMessage):
            content = joined(contents(item.content, f"{path}.content"))
            if item.role == "assistant":
                answer = {"role": item.role, "content": content}
            else:
                yield ChatMessage.model_validate({"role": item.role, "content": content})
        elif isinstance(item, DecisionCallOutput):
            yield _message("tool", contents(item.output, f"{path}.output"), tool_call_id=item.call_id)
        else:
            name = item.name if item.namespace is None else f"{item.namespace}__{item.name}"
            arguments = item.arguments if isinstance(item, DecisionFunctionCall) else {"input": item.input}
            function = {"name": name, "arguments": arguments}
            answer = {"role": "assistant", **answer}
            answer.setdefault("tool_calls", []).append({"id": item.call_id, "function": function})
    if answer:
        yield ChatMessage.model_validate(answer)


def _message(role: str, parts: Any, **fields: object) -> ChatMessage:
    return ChatMessage.model_validate({"role": role, "content": joined(parts), **fields})


@dataclass(frozen=True, kw_only=True)
class DecisionCall(ApiCall):
    """A request for answers to questions about one conversation. `param`: the body's field that has it."""

    settings: ApiSettings
    messages: Sequence[ChatMessage]
    asked: Sequence[Asked]
    render: RenderAnswers
    param: str

    def check(self) -> None:
        limit = self.settings.max_pooling_inputs
        if len(self.asked) > limit:
            message = f"{len(self.asked)} questions are above the limit of {limit} in one request."
            raise InvalidRequest(message, param="questions")

    async def prepare(self, model: ServedModel) -> "DecisionJob":
        check_task(PoolingTask.TOKEN_LOGPROBS, model.info)
        maker = PromptMaker(model=model, settings=self.settings, messages=self.messages, param=self.param)
        prompts = await maker.prompts([row for each in self.asked for row in each.rows])
        first, size = prompts.rows[0].prompt, prompts.num_shared
        # Images are shared as a whole, or not at all.
        shared = Prompt(first.token_ids[:size], images=tuple(image for image in first.images if image.end <= size))
        # An engine caches whole blocks. `Job.prompts` is what is routed, and found in a cache.
        is_shared = model.info.prefix_caching and len(prompts.rows) > 1 and size >= model.info.block_size
        return DecisionJob(
            prompts=[shared if is_shared else first],
            warnings=prompts.warnings,
            asked=self.asked,
            questions=prompts,
            is_shared=is_shared,
            render=self.render,
        )


@dataclass(frozen=True, kw_only=True)
class DecisionJob(Job):
    """`prompts` has what the prompts of all questions begin with, if it is a request of its own (`is_shared`); else the
    first prompt. The tokens of what they begin with count once."""

    asked: Sequence[Asked]
    questions: QuestionPrompts
    is_shared: bool
    render: RenderAnswers

    @property
    def num_tokens(self) -> int:
        return self.questions.num_tokens

    @property
    def num_image_bytes(self) -> int:
        prompts = (each.prompt for each in self.questions.rows)
        return sum({image.hash: len(image.pixels) for prompt in prompts for image in prompt.images}.values())

    @property
    def uses_prefix_cache(self) -> bool:
        return True

    def check(self, model: ServedModel) -> None:
        """All prompts were checked when they were made."""

    async def run(self, running: Running, writer: ResponseWriter) -> None:
        rows = self.questions.rows
        if self.is_shared:
            (shared,) = self.prompts
            await compute([PooledInput(shared.token_ids, _reads((0,)), shared.images)], running)
        readings = [LabelReading(each.labels.tokens) for each in rows]
        while wanted := [each async for each in _wanted(readings, rows)]:
            outputs = await compute([each.input for each in wanted], running)
            for each, output in zip(wanted, outputs, strict=True):
                each.reading.add(each.beginning, each.tokens, numbers(output.values).tolist())
        distributions = list(_by_question(self.asked, (each.distribution() for each in readings)))
        await writer.send(self.render(distributions, running.prepared.model.name, running.usage))


@dataclass(frozen=True, slots=True)
class _Wanted:
    """The probabilities of `tokens`, behind a prompt and `beginning`."""

    reading: LabelReading
    prompt: Prompt
    beginning: Tokens
    tokens: Tokens

    @property
    def input(self) -> PooledInput:
        prompt = self.prompt
        token_ids = [*prompt.token_ids, *self.beginning] if self.beginning else prompt.token_ids
        return PooledInput(token_ids, _reads(self.tokens), prompt.images)


async def _wanted(readings: Sequence[LabelReading], rows: Sequence[QuestionPrompt]) -> AsyncIterator[_Wanted]:
    for index, (reading, row) in enumerate(zip(readings, rows, strict=True)):
        for beginning, tokens in reading.next_tokens().items():
            yield _Wanted(reading, row.prompt, beginning, tokens)
        if index % _IN_A_TURN == 0:
            await asyncio.sleep(0)


def _by_question(asked: Sequence[Asked], rows: Iterator[Distribution]) -> Iterator[Distribution]:
    """`rows`: the distributions of all questions' rows, in order."""
    for each in asked:
        first = next(rows)
        yield first.evened(next(rows)) if each.in_both_orders else first


def _reads(tokens: Tokens) -> PoolingParams:
    return PoolingParams(task=PoolingTask.TOKEN_LOGPROBS, score_token_ids=tokens)
