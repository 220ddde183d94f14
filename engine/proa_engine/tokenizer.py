"""The model's tokenizer and chat template, for the offline `LLM`."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from proa.chat_template import cut_at_mark, marked
from proa.fit_messages import fit_messages
from proa.model_tokenizer import ModelTokenizer
from proa.template_rules import messages_as_read

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """How a conversation becomes a prompt. `tools`: in the form of the OpenAI API. `template`: the source of another
    chat template; None: the model's own. `variables`: of the template. `add_generation_prompt`: the prompt ends with
    the opening of the assistant's message. `continue_final_message`: it ends within the last message.

    Raises `ValueError` for both at once, and for variables that are arguments of their own.
    """

    tools: Sequence[Mapping[str, Any]] | None = None
    template: str | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    def __post_init__(self) -> None:
        if self.add_generation_prompt and self.continue_final_message:
            raise ValueError("add_generation_prompt and continue_final_message cannot both be true")
        for name in ("messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template"):
            if name in self.variables:
                raise ValueError(f"chat_template_kwargs must not have {name}: it is an argument of its own")


class Tokenizer:
    """Text to token ids and back.

    `vocabulary` is for `proa.text.TextStream`. `added_tokens` are the ids of added tokens by text, for `proa.grammar`.
    """

    def __init__(self, files: Mapping[str, bytes]) -> None:
        """Raises `ValueError` for a file that is missing or wrong."""
        if "tokenizer.json" not in files:
            raise ValueError("the model has no tokenizer.json; set skip_tokenizer_init to work with token ids alone")
        self._model = ModelTokenizer.load(files)
        self._tokenizer = self._model.tokenizer
        self.vocabulary, self.added_tokens = self._model.vocabulary, self._model.added_tokens

    @property
    def plain_token_ids(self) -> list[int]:
        """The ids of all tokens but the added ones, ascending."""
        vocabulary: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=False)
        return sorted(set(vocabulary.values()) - set(self.added_tokens.values()))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def encode_pair(self, first: str, second: str) -> tuple[list[int], int | None]:
        """The token ids of two texts, and the number of tokens before the second one; None if the tokenizer does not
        tell the two apart."""
        encoding = self._tokenizer.encode(first, second)
        types: list[int] = encoding.type_ids
        return list(encoding.ids), types.index(1) if 1 in types else None

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text

    def decode_token(self, token_id: int) -> str:
        """The text of one token, or the name of a special token. Incomplete UTF-8 becomes U+FFFD."""
        return self.vocabulary.token_bytes(token_id).decode(errors="replace")

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], options: ChatOptions | None = None
    ) -> list[int]:
        """The token ids of `render_chat`."""
        return self.encode(self.render_chat(messages, options), add_special_tokens=False)

    def render_chat(self, messages: Sequence[Mapping[str, Any]], options: ChatOptions | None = None) -> str:
        """The prompt's text, with special tokens. `options` None: the defaults. Messages of a shape that the template
        does not read are changed into one that it reads, with a warning in the log.

        Raises `ValueError` if there is no chat template, if the template ignores tools that are given, if it leaves out
        a message that is to be continued, or if it raises for these messages.
        """
        options = options or ChatOptions()
        own = self._model.templates
        template = own.plain if options.template is None else self._model.compile_template(options.template)
        if template is None:
            raise ValueError(own.error or "the model has no chat template")
        variables = dict(options.variables)
        if options.tools:
            if "tools" not in template.variables:
                raise ValueError("the model's chat template does not use tools")
            variables["tools"] = options.tools
        fitted, warnings = fit_messages(messages, template.rules)
        for warning in warnings:
            _log.warning("%s", warning)
        read = messages_as_read(fitted, template.content_forms, keeps_null=template.tests_none)
        if not options.continue_final_message:
            return template.render(read, variables, add_generation_prompt=options.add_generation_prompt)
        if not read:
            raise ValueError("continue_final_message needs a message")
        *before, last = read
        continued = {**last, "content": marked(last.get("content") or "")}
        text = cut_at_mark(template.render([*before, continued], variables, add_generation_prompt=False))
        if text is None:
            raise ValueError("continue_final_message: the chat template leaves out the last message")
        return text

    def bad_words_token_ids(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """The tokens of each word at the start of a text and after a space, without duplicates."""
        sequences = (
            tuple(self.encode(prefix + word.lstrip(), add_special_tokens=False))
            for word in words
            for prefix in ("", " ")
        )
        return tuple(dict.fromkeys(sequence for sequence in sequences if sequence))
