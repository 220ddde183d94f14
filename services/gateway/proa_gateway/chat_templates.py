"""Rendering the chat templates of one model without holding up the event loop."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

from proa.chat_template import ChatTemplate, ChatTemplateTooCostly
from proa.template_budget import Budget

INLINE_SECONDS: Final = 0.002
INLINE_SIZE: Final = 2**20
MAX_COMPILED: Final = 16
"""Templates of requests that are kept compiled. Compiling one takes about 30 ms."""
T = TypeVar("T")


class TemplateRenderer:
    """Renders templates on the event loop if that takes a moment, and otherwise on a thread of its own.

    One thread for each model: the templates of a model that take long hold up no other model.
    """

    def __init__(self, special_tokens: Mapping[str, str]) -> None:
        """`special_tokens`: the model's, for the templates of requests."""
        self._special_tokens = special_tokens
        self._compiled: OrderedDict[str, ChatTemplate] = OrderedDict()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="template")  # starts with the first long rendering

    async def compile(self, source: str) -> ChatTemplate:
        """The template of a request, also compiled on the thread. Raises `ChatTemplateError`."""
        template = self._compiled.get(source)
        if template is None:
            template = await self._in_thread(lambda: self._compile(source))
            self._compiled[source] = template
            if len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        else:
            self._compiled.move_to_end(source)
        return template

    async def render(
        self,
        template: ChatTemplate,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, object],
        *,
        add_generation_prompt: bool,
    ) -> str:
        """The prompt. Raises `ChatTemplateError`, and `ChatTemplateTooCostly` if the template is stopped."""
        if template.seconds_per_message * len(messages) < INLINE_SECONDS:
            budget = Budget(INLINE_SECONDS, INLINE_SIZE, is_inline=True)
            try:
                return template.render(messages, variables, add_generation_prompt=add_generation_prompt, budget=budget)
            except ChatTemplateTooCostly:
                pass  # it starts again on the thread
        return await self._in_thread(
            lambda: template.render(messages, variables, add_generation_prompt=add_generation_prompt)
        )

    def _compile(self, source: str) -> ChatTemplate:
        template = ChatTemplate(source, special_tokens=self._special_tokens)
        prepare(template)
        return template

    async def _in_thread(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)


def prepare(*templates: ChatTemplate | None) -> None:
    """Find out all that rendering asks of a template, which takes milliseconds. Not on an event loop."""
    for template in templates:
        if template is not None:
            _ = template.content_forms
