"""Tokenizer: a model's tokenizer, chat templates and default sampling parameters, from the model's files.

Neither long texts nor templates that take long hold up the event loop.
"""

import asyncio
import re
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, TypeVar

import tokenizers

from proa.chat_template import ChatTemplate, ChatTemplateTooCostly, special_tokens
from proa.model_tokenizer import ModelTokenizer
from proa.template_budget import Budget
from proa.tokenizer_files import read_object, sampling_defaults

MAX_INLINE_CHARACTERS = 2000  # longer texts are encoded on another thread; these take about half a millisecond
_TEXT_OVERHEAD = 40  # characters that take as long as encoding no text
PIECE_CHARACTERS = 65_536  # of a long text whose tokens are counted
CUT_TOKENS = 16  # by which a piece may have more
MAX_UNCHECKED_CHARACTERS = 1_000_000  # for which encoding takes up to 200 MB
MAX_PREFIX_CHARACTERS = 2**25  # of all beginnings of special tokens; Gemma's have 500,000
MAX_INLINE_TOKENS = 1000  # more are decoded on another thread

INLINE_SECONDS: Final = 0.002  # of rendering a template
INLINE_SIZE: Final = 2**20  # of what it makes, as `Budget` counts it
MAX_COMPILED: Final = 16
"""Templates of requests that are kept compiled. Compiling one takes about 30 ms."""

MARK: Final = "\ufdd0"
"""Divides a text that is encoded by `encode_marked`, and is no part of it. A noncharacter: no text should have it."""

T = TypeVar("T")


class ControlTokens:
    """Tokens that a text should not have by chance. `starts`: the first character of each of them, where the rest
    follows; None: there are no such tokens. `prefixes`: what is the beginning of one, and not all of it. Raises
    `ValueError` for tokens that no model has."""

    def __init__(self, tokens: Collection[str]) -> None:
        tokens = {token for token in tokens if len(token) > 1}
        if sum(len(token) ** 2 // 2 for token in tokens) > MAX_PREFIX_CHARACTERS:
            raise ValueError("tokenizer.json has special tokens that are too long")
        firsts = sorted({token[0] for token in tokens})
        rests = {first: {token[1:] for token in tokens if token[0] == first} for first in firsts}
        # Not one lookahead for all tokens: a pattern that begins with a character is searched ten times as fast.
        try:
            pattern = "|".join(f"{re.escape(first)}(?={_beginning(rests[first])})" for first in firsts)
            self.starts = re.compile(pattern) if pattern else None
        except RecursionError as error:
            raise ValueError("tokenizer.json has too many special tokens that begin alike") from error
        self.prefixes = frozenset(token[:size] for token in tokens for size in range(1, len(token)))
        self.max_prefix = max(map(len, self.prefixes), default=0)


class TemplateRenderer:
    """Renders templates on the event loop if that takes a moment, and otherwise on a thread of its own.

    One thread for each model: the templates of a model that take long hold up no other model.
    """

    def __init__(self, special_tokens: Mapping[str, str]) -> None:
        """`special_tokens`: the model's, for the templates of requests."""
        self._special_tokens = special_tokens
        self._compiled: OrderedDict[str, ChatTemplate] = OrderedDict()  # by source, least recently used first
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
            _ = template.rules


@dataclass(frozen=True, slots=True)
class LateInteractionTexts:
    """What PyLate makes of texts. `query_length`: to so many tokens queries are cut, or expanded by `expansion_id`; 0:
    neither."""

    query_prefix: str  # a token of the tokenizer, or nothing, as that of documents
    document_prefix: str
    query_length: int
    expansion_id: int
    attends_to_expansion: bool  # False: no token attends to those that expand a query


class Tokenizer:
    """One for each model. `executor` encodes long texts and decodes many tokens.

    `template_error`: why the model's chat template cannot be used; empty if it can, or if there is none. `info`: the
    fields of tokenizer_config.json, with special tokens as strings and the chat template in use.
    `longest_token`: how many characters of a text one token may stand for.
    """

    def __init__(self, files: Mapping[str, bytes], executor: Executor) -> None:
        """Raises `ValueError` for a file that is missing or wrong; for a chat template there is `template_error`. Takes
        up to seconds for large vocabularies."""
        model = ModelTokenizer.load(files)
        self._tokenizer = model.tokenizer
        self._executor = executor
        config, templates = model.config, model.templates
        prepare(templates.plain, templates.tools)
        self.chat_template, self._tool_template = templates.plain, templates.tools
        self.template_error = templates.error
        self.templates = TemplateRenderer(special_tokens(config))
        self.tool_template_source = templates.tool_source  # empty: there is none that can be used
        self.sampling_defaults = sampling_defaults(files)  # of generation_config.json, by the names of `SamplingParams`
        self.info = _tokenizer_info(config, templates.source)
        sentence_transformers = read_object(files, "config_sentence_transformers.json")
        self.task_prompts = _task_prompts(sentence_transformers)  # by task
        self.late_interaction = _late_interaction(sentence_transformers, self._expansion_id(config))
        self.response_template: object = config.get("response_template")  # as transformers reads it
        self.vocabulary, self.added_tokens = model.vocabulary, model.added_tokens
        self.longest_token = max(map(len, self._tokenizer.get_vocab()), default=1)
        added = self._tokenizer.get_added_tokens_decoder().values()
        specials = {token.content for token in added if token.special}
        # Those that the template writes too: in DeepSeek's files the beginning of a user's message is not special. But
        # not all added tokens: in Gemma's files there are line breaks and `<table>`.
        sources = templates.source + templates.tool_source
        written = {token for token in self.added_tokens if token.strip() and token in sources}
        self.special_control_tokens = ControlTokens(specials)  # special by the tokenizer's files
        self.control_tokens = ControlTokens(specials | written)

    def _expansion_id(self, config: Mapping[str, Any]) -> int | None:
        """The token that PyLate expands queries with. `config`: tokenizer_config.json."""
        named = special_tokens(config)
        ids = (self._tokenizer.token_to_id(named.get(name, "")) for name in ("mask_token", "eos_token", "pad_token"))
        return next((token_id for token_id in ids if token_id is not None), None)

    def template_for(self, *, tools: bool) -> ChatTemplate | None:
        """The chat template of a chat with or without tools."""
        return self._tool_template if tools else self.chat_template

    async def has_more_tokens(self, text: str, limit: int) -> bool:
        """Whether the text has more tokens than `limit`, where that can be known with less memory than encoding it
        takes, 110 to 180 bytes a token. It may be wrong by a thousandth. Texts that cannot have many more are not
        looked at."""
        size = len(text)
        if size > limit * self.longest_token:
            return True
        if size <= PIECE_CHARACTERS or size <= min(2 * limit, MAX_UNCHECKED_CHARACTERS):
            return False
        return await self._in_thread(lambda: self._count_in_pieces(text, limit) > limit)

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        if len(text) <= MAX_INLINE_CHARACTERS:
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return await self._in_thread(lambda: self._encode_without_gil(text, add_special_tokens))

    def encode_now(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    async def encode_marked(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """`encode` a text that is divided by marks: no token is made of characters on both sides of one."""
        if MARK not in text:
            return await self.encode(text, add_special_tokens=add_special_tokens)
        return await self._in_thread(lambda: self._encode_marked(text, add_special_tokens))

    async def work_on(self, texts: Iterable[str], function: Callable[[tokenizers.Tokenizer], T]) -> T:
        """Call the function, which encodes these texts, on another thread if they are long."""
        if sum(len(text) + _TEXT_OVERHEAD for text in texts) <= MAX_INLINE_CHARACTERS:
            return function(self._tokenizer)
        return await self._in_thread(lambda: function(self._tokenizer))

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """`decode`, on another thread if there are many tokens."""
        if len(token_ids) <= MAX_INLINE_TOKENS:
            return self.decode(token_ids)
        return await self._in_thread(lambda: self._tokenizer.decode_batch([token_ids], skip_special_tokens=False)[0])

    async def token_strs(self, token_ids: Sequence[int]) -> list[str]:
        """The tokens as the vocabulary spells them: in a byte-level one, `Ġ` is a space."""
        name = self._tokenizer.id_to_token
        if len(token_ids) <= MAX_INLINE_TOKENS:
            return [name(token_id) or "" for token_id in token_ids]
        return await self._in_thread(lambda: [name(token_id) or "" for token_id in token_ids])

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=False)

    async def _in_thread(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, function)

    def _count_in_pieces(self, text: str, limit: int) -> int:
        """The text's tokens, or more than `limit`. The cuts may add some, for which there is an allowance."""
        count = 0
        for start in range(0, len(text), PIECE_CHARACTERS):
            piece = text[start : start + PIECE_CHARACTERS]
            count += len(self._tokenizer.encode_batch_fast([piece], add_special_tokens=False)[0]) - CUT_TOKENS
            if count > limit:
                break
        return count

    def _encode_without_gil(self, text: str, add_special_tokens: bool) -> list[int]:
        # Of the tokenizers calls, only batches release the interpreter lock.
        return self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def _encode_marked(self, text: str, add_special_tokens: bool) -> list[int]:
        tokenizer, mark_id = self._marking
        encoding = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
        return [token_id for token_id in encoding.ids if token_id != mark_id]

    @cached_property
    def _marking(self) -> tuple[tokenizers.Tokenizer, int]:
        """The tokenizer with the mark as one more token, and its id. Made when it is needed: it takes as long as the
        tokenizer itself, and as much memory."""
        tokenizer = tokenizers.Tokenizer.from_str(self._tokenizer.to_str())
        tokenizer.add_special_tokens([tokenizers.AddedToken(MARK, normalized=False)])
        mark_id = tokenizer.token_to_id(MARK)
        assert mark_id is not None
        return tokenizer, mark_id


def _beginning(texts: Collection[str]) -> str:
    """The pattern of a text that begins with one of these. It compares a character once, however many texts there are:
    some tokenizers have 900 special tokens that begin alike."""
    if "" in texts:
        return ""
    if len(texts) == 1:
        return re.escape(*texts)
    firsts = sorted({text[0] for text in texts})
    parts = [re.escape(first) + _beginning({text[1:] for text in texts if text[0] == first}) for first in firsts]
    return parts[0] if len(parts) == 1 else f"(?:{'|'.join(parts)})"


def _task_prompts(config: Mapping[str, Any]) -> dict[str, str]:
    """The texts that sentence-transformers puts before those that are embedded, by the name of what they are for."""
    prompts = config.get("prompts")
    return {name: text for name, text in prompts.items() if isinstance(text, str)} if isinstance(prompts, dict) else {}


def _late_interaction(config: Mapping[str, Any], expansion_id: int | None) -> LateInteractionTexts:
    """`config`: as PyLate saves it."""
    query, document = (config.get(f"{name}_prefix") for name in ("query", "document"))
    length = config.get("query_length")
    expands = expansion_id is not None and config.get("do_query_expansion", True) is not False
    return LateInteractionTexts(
        query if isinstance(query, str) else "",
        document if isinstance(document, str) else "",
        max(0, length) if expands and isinstance(length, int) else 0,
        expansion_id or 0,
        config.get("attend_to_expansion_tokens") is True,
    )


def _tokenizer_info(config: Mapping[str, Any], chat_template: str) -> dict[str, Any]:
    info = {"tokenizer_class": "PreTrainedTokenizerFast", **{name: _plain(value) for name, value in config.items()}}
    info.pop("chat_template", None)  # may be several
    return info | ({"chat_template": chat_template} if chat_template else {})


def _plain(value: Any) -> Any:
    """Tokens that are objects with a `content` as their content."""
    if isinstance(value, dict):
        content = value.get("content")
        return content if isinstance(content, str) else {name: _plain(entry) for name, entry in value.items()}
    return [_plain(entry) for entry in value] if isinstance(value, list) else value
