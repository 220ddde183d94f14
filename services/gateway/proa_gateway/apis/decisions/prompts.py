"""Prompts that ask questions about one conversation, one for each row: the conversation is their common beginning.

The conversation is rendered and tokenized once, with one of the questions. The tokens of the others are those of their
own text behind the last added token before it, where tokenizers divide texts anyway. Where a question cannot be put in
the place of another (it has images, or the template changes its text), its prompt is made like that of any chat.
"""

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from proa.contract import Image
from proa_gateway.apis.decisions.contents import QuestionRow
from proa_gateway.apis.decisions.labels import Labels, choose_labels
from proa_gateway.engines.models import ServedModel
from proa_gateway.errors import ContextOverflow, InvalidRequest, UnsupportedTask
from proa_gateway.parsing.format import ToolFormat
from proa_gateway.parsing.grammars.message import Reasoning
from proa_gateway.pooling.inputs import Limit, encode_texts
from proa_gateway.serving.choices import Prompt
from proa_gateway.serving.content import ImagePart, joined
from proa_gateway.serving.conversation import ChatMessage, Conversation, ReasoningFields
from proa_gateway.serving.conversation_call import ConversationReader
from proa_gateway.serving.generation_request import GenerationRequest
from proa_gateway.serving.job import ApiSettings
from proa_gateway.serving.prompt import check_text_fits

_NO_REASONING: Final = ReasoningFields(thinking=False, thinking_field="", effort_field="")


@dataclass(frozen=True, slots=True)
class QuestionPrompt:
    """The prompt of a question's row, which its answer's label follows."""

    prompt: Prompt
    labels: Labels


@dataclass(frozen=True, slots=True)
class QuestionPrompts:
    """`num_shared`: tokens that all prompts begin with. `warnings`: about what was changed for the chat template."""

    rows: Sequence[QuestionPrompt]
    num_shared: int
    warnings: Sequence[str]

    @property
    def num_tokens(self) -> int:
        """Those of all prompts, of which the shared ones count once."""
        return sum(self.num_own(each) for each in self.rows) + self.num_shared

    def num_own(self, row: QuestionPrompt) -> int:
        """Tokens of the row's prompt that are not shared."""
        return len(row.prompt.token_ids) - self.num_shared


@dataclass(frozen=True, slots=True)
class _Ending:
    """What a prompt has behind its last message: `closing` ends the reasoning that the template has opened, `tail` is
    all text after the last added token."""

    closing: str
    tail: str


@dataclass(frozen=True, slots=True)
class _Begun:
    """A prompt without what closes reasoning. Arrays, since all prompts together may have a million tokens."""

    token_ids: "array[int]"
    images: tuple[Image, ...]  # in the prompt, with their pixels
    text: str = ""  # of the one that is rendered
    warnings: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class _Frame:
    """A prompt into which other questions fit: the tokens of its conversation, and the texts around the question
    behind them."""

    token_ids: "array[int]"
    opening: str  # before the question
    foot: str  # behind the question


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptMaker:
    """`messages`: of the conversation. `param`: the body's field that errors about it name."""

    model: ServedModel
    settings: ApiSettings
    messages: Sequence[ChatMessage]
    param: str

    async def prompts(self, rows: Sequence[QuestionRow]) -> QuestionPrompts:
        """One for each row, in order. Raises `InvalidRequest`, `UnsupportedTask` and `Overloaded`."""
        ending = await self._ending()
        sizes = {len(each.options) for each in rows}
        labels = {size: await self._labels(ending.tail, size) for size in sizes}
        contents = [_content(each, labels[len(each.options)]) for each in rows]
        for row, content in zip(rows, contents, strict=True):
            own = "\n".join(part for part in content if isinstance(part, str))
            await check_text_fits(own, self.model, self.model.info.max_model_len, row.path)
        prompts = await self._all_prompts(contents)
        closing = array("I", await self.model.tokenizer.encode(ending.closing, add_special_tokens=False))
        made = [
            QuestionPrompt(Prompt(prompt.token_ids + closing, images=prompt.images), labels[len(each.options)])
            for each, prompt in zip(rows, prompts, strict=True)
        ]
        self._check(rows, made)
        warnings = dict.fromkeys(warning for prompt in prompts for warning in prompt.warnings)
        return QuestionPrompts(made, num_shared(prompts), list(warnings))

    async def _ending(self) -> _Ending:
        """Found with a short message: the template adds the same behind any."""
        model_format = self.settings.formats.of(self.model)
        message = ChatMessage.model_validate({"role": "user", "content": "?"})
        read = await self._reader([message]).read(self.model, model_format)
        message_format, text, closing = read.prompt.message_format, read.prompt.text or "", ""
        if model_format is not None and message_format is not None:
            closing = _closing(model_format.tool_format, message_format.reasoning, text)
        text += closing
        return _Ending(closing, text[_end_of_added(text, self.model.tokenizer.added_tokens) :])

    async def _labels(self, tail: str, num_options: int) -> Labels:
        choose = self.model.tokenizer.work_on
        labels = await choose([tail] * num_options, lambda tokenizer: choose_labels(tokenizer, tail, num_options))
        if labels is None:
            message = f"The vocabulary of {self.model.name!r} has no labels for {num_options} options."
            raise UnsupportedTask(message, param="model")
        return labels

    async def _all_prompts(self, contents: Sequence[Sequence[str | ImagePart]]) -> list[_Begun]:
        texts = [joined(each) for each in contents]
        made: dict[int, _Begun] = {}
        plain = {index: text for index, text in enumerate(texts) if isinstance(text, str)}
        if plain:
            sample, text = next(iter(plain.items()))
            made[sample] = await self._read(text)
            made |= await self._in_place_of(made[sample], plain.pop(sample), plain)
        num_tokens = sum(len(prompt.token_ids) for prompt in made.values())
        for index, content in enumerate(texts):
            self._check_size(num_tokens)
            if index not in made:
                made[index] = await self._read(content)
                num_tokens += len(made[index].token_ids)
        self._check_size(num_tokens)
        return [made[index] for index in range(len(texts))]

    async def _in_place_of(self, prompt: _Begun, question: str, others: Mapping[int, str]) -> dict[int, _Begun]:
        """The prompts of other questions, made from that of one. Empty if they cannot be."""
        frame = await self._frame(prompt, question) if others else None
        if frame is None:
            return {}
        # Of the conversation at least, since a token has at least a byte.
        num_tokens = len(prompt.token_ids) - len(f"{question}{frame.foot}".encode())
        self._check_size(num_tokens * (1 + len(others)))
        encoded = await self._encode([f"{frame.opening}{other}{frame.foot}" for other in others.values()])
        return {
            index: _Begun(frame.token_ids + token_ids, prompt.images)
            for index, token_ids in zip(others, encoded, strict=True)
        }

    async def _read(self, content: object) -> _Begun:
        message = ChatMessage.model_validate({"role": "user", "content": content})
        read = await self._reader([*self.messages, message]).read(self.model)
        prompt = read.prompt
        return _Begun(array("I", prompt.token_ids), prompt.images, prompt.text or "", read.warnings)

    def _reader(self, messages: Sequence[ChatMessage]) -> ConversationReader:
        return ConversationReader(
            conversation=Conversation(messages=messages),
            request=GenerationRequest.model_construct(),
            settings=self.settings,
            param=self.param,
            reasoning_fields=_NO_REASONING,
        )

    async def _frame(self, prompt: _Begun, question: str) -> _Frame | None:
        """None: other questions do not fit, or it cannot be seen whether they do."""
        # With plain texts, a question's tokens depend on where its text stands.
        if self.settings.plain_texts or prompt.text.count(question) != 1:
            return None
        head, _, foot = prompt.text.partition(question)
        used = set(prompt.token_ids)
        added = [token for token, token_id in self.model.tokenizer.added_tokens.items() if token_id in used]
        opening = head[_end_of_added(head, added) :]
        (behind,) = await self._encode([f"{opening}{question}{foot}"])
        before = prompt.token_ids[: len(prompt.token_ids) - len(behind)]
        if before + behind != prompt.token_ids or any(image.end > len(before) for image in prompt.images):
            return None
        return _Frame(before, opening, foot)

    async def _encode(self, texts: Sequence[str]) -> "list[array[int]]":
        encoded = await self.model.tokenizer.work_on(
            texts, lambda tokenizer: encode_texts(tokenizer, texts, Limit(), add_special_tokens=False)
        )
        return [array("I", token_ids) for token_ids in encoded]

    def _check_size(self, num_tokens: int) -> None:
        """Raises `InvalidRequest` for prompts that have at least so many tokens in all."""
        limit = self.settings.max_pooling_tokens
        if num_tokens > limit:
            message = f"The questions' prompts have over {limit} tokens in all: ask fewer, or send a shorter input."
            raise InvalidRequest(message, param=self.param)

    def _check(self, rows: Sequence[QuestionRow], made: Sequence[QuestionPrompt]) -> None:
        longest = self.model.info.max_model_len
        for row, each in zip(rows, made, strict=True):
            num_tokens = len(each.prompt.token_ids) + each.labels.longest - 1
            if num_tokens > longest:
                message = (
                    f"This model's maximum context length is {longest} tokens. However, the prompt of {row.path} "
                    f"has {num_tokens} tokens. Please reduce the length of the input or of the question."
                )
                raise ContextOverflow(message, param=self.param)


def _content(row: QuestionRow, labels: Labels) -> list[str | ImagePart]:
    """The question as a message, with its options behind their labels."""
    options = [f"{label}: {option}" for label, option in zip(labels.texts, row.options, strict=True)]
    return ["Question:", *row.content, *options, "Answer with one label."]


def _closing(tool_format: ToolFormat, reasoning: Reasoning, prompt: str) -> str:
    """What the model writes between the end of the prompt and its answer, if it does not reason. Where the opening of
    reasoning has a line of its own, a blank line comes before the answer: without it, the model would write that
    first."""
    if tool_format.channels is not None:
        channels = tool_format.channels
        return f"{channels.open}{channels.answer}{channels.body}"
    if reasoning is Reasoning.OPEN and tool_format.reasoning is not None:
        return tool_format.reasoning[1] + ("\n\n" if prompt.endswith("\n") else "")
    return ""


def _end_of_added(text: str, added_tokens: Iterable[str]) -> int:
    """The index behind the last added token in the text; 0 if there is none."""
    return max((text.rfind(token) + len(token) for token in added_tokens if token and token in text), default=0)


def num_shared(prompts: Sequence[_Begun]) -> int:
    """The number of tokens, and of all tokens of images, that all prompts begin with."""
    first, *others = prompts
    return min((_common(first, other) for other in others), default=len(first.token_ids))


def _common(first: _Begun, other: _Begun) -> int:
    size = min(len(first.token_ids), len(other.token_ids))
    ours, theirs = (np.frombuffer(each.token_ids, "u4", size) for each in (first, other))
    different = np.flatnonzero(ours != theirs)
    shared = int(different[0]) if len(different) else size
    for index, image in enumerate(first.images):
        if image not in other.images[index : index + 1]:
            return min(shared, image.offset)
    rest = other.images[len(first.images) :]
    return min([shared, *(image.offset for image in rest[:1])])
