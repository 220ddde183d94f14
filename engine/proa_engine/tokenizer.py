"""The model's tokenizer and chat template, for the offline `LLM`."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer as HuggingFaceTokenizer

from proa.chat_template import ChatTemplate, special_tokens, template_source
from proa.text import Vocabulary
from proa.tokenizer_files import CHAT_TEMPLATE_FILE


class Tokenizer:
    """Text to token ids and back.

    `vocabulary` is for `proa.text.TextStream`. `added_tokens` are the ids of added tokens by text, for `proa.grammar`.
    """

    def __init__(self, files: Mapping[str, bytes]) -> None:
        """Raises `ValueError` without a tokenizer.json among `files`."""
        if "tokenizer.json" not in files:
            raise ValueError("the model has no tokenizer.json; set skip_tokenizer_init to work with token ids alone")
        self._tokenizer = HuggingFaceTokenizer.from_buffer(files["tokenizer.json"])
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        config: dict[str, Any] = json.loads(files.get("tokenizer_config.json", b"{}"))
        source = template_source(config, files.get(CHAT_TEMPLATE_FILE))
        self._chat_template = ChatTemplate(source, special_tokens=special_tokens(config)) if source else None
        self.vocabulary = Vocabulary(self._tokenizer)
        added = self._tokenizer.get_added_tokens_decoder()
        self.added_tokens = {token.content: token_id for token_id, token in added.items()}

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
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> list[int]:
        """The token ids of `render_chat`."""
        return self.encode(self.render_chat(messages, tools), add_special_tokens=False)

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> str:
        """The text that prompts for the assistant's next message, with special tokens. `tools`: in the form of the
        OpenAI API.

        Raises `ValueError` if the model has no chat template, if the template ignores tools that are given, or if it
        raises for these messages.
        """
        if self._chat_template is None:
            raise ValueError("the model has no chat template")
        if tools and "tools" not in self._chat_template.variables:
            raise ValueError("the model's chat template does not use tools")
        return self._chat_template.render(messages, {"tools": tools} if tools else {})

    def bad_words_token_ids(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """The tokens of each word at the start of a text and after a space, without duplicates."""
        sequences = (
            tuple(self.encode(prefix + word.lstrip(), add_special_tokens=False))
            for word in words
            for prefix in ("", " ")
        )
        return tuple(dict.fromkeys(sequence for sequence in sequences if sequence))
