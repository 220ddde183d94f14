"""Tokenizer: a model's tokenizer, chat template and default sampling parameters, from the model's files."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from typing import Any

import tokenizers

from proa.chat_template import ChatTemplate, special_tokens, template_source
from proa.text import Vocabulary

# Longer texts are encoded on another thread. Encoding this many characters takes about half a millisecond.
MAX_INLINE_CHARACTERS = 2000
# The sampling parameters whose defaults a model's generation_config.json may set.
SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


class Tokenizer:
    """One for each model. `executor` encodes long texts."""

    def __init__(self, files: Mapping[str, bytes], executor: Executor) -> None:
        """Raises `ValueError` if tokenizer.json is missing or invalid. Takes up to seconds for large vocabularies."""
        if "tokenizer.json" not in files:
            raise ValueError("there is no tokenizer.json")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(files["tokenizer.json"])
        except Exception as error:  # tokenizers raises plain Exception
            raise ValueError(f"tokenizer.json cannot be read: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._executor = executor
        config = _json(files.get("tokenizer_config.json"))
        source = template_source(config, files.get("chat_template.jinja"))
        self._special_tokens = special_tokens(config)
        self.chat_template = self.compile_template(source) if source else None
        self.sampling_defaults = _sampling_defaults(_json(files.get("generation_config.json")))
        self.vocabulary = Vocabulary(self._tokenizer)

    def compile_template(self, source: str) -> ChatTemplate:
        """A chat template with the model's special tokens. Raises `ChatTemplateError`."""
        return ChatTemplate(source, special_tokens=self._special_tokens)

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        if len(text) <= MAX_INLINE_CHARACTERS:
            return self.encode_now(text, add_special_tokens=add_special_tokens)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, self._encode_without_gil, text, add_special_tokens)

    def encode_now(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=False)

    def _encode_without_gil(self, text: str, add_special_tokens: bool) -> list[int]:
        # Of the tokenizers calls, only batches release the interpreter lock.
        return self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids


def _json(data: bytes | None) -> dict[str, Any]:
    value = json.loads(data) if data else {}
    return value if isinstance(value, dict) else {}


def _sampling_defaults(config: Mapping[str, Any]) -> dict[str, float]:
    return {name: config[name] for name in SAMPLING_DEFAULTS if isinstance(config.get(name), int | float)}
