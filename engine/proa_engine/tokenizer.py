"""The model's own tokenizer and chat template, as the offline `LLM` uses them and as GetTokenizer sends them."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer as HuggingFaceTokenizer

from proa.text import Vocabulary
from proa.tokenizer_files import FILE_NAMES


def read_tokenizer_files(folder: Path | None) -> dict[str, bytes]:
    """The tokenizer's files that there are, by name; empty without a tokenizer.json."""
    if folder is None or not (folder / "tokenizer.json").is_file():
        return {}
    return {name: (folder / name).read_bytes() for name in FILE_NAMES if (folder / name).is_file()}


class Tokenizer:
    """Text to token ids and back. `vocabulary` is what `proa.text` makes streams of."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        """Raises `ValueError` where there is no tokenizer.json."""
        if "tokenizer.json" not in files:
            raise ValueError("the model has no tokenizer.json; set skip_tokenizer_init to work with token ids alone")
        self._tokenizer = HuggingFaceTokenizer.from_buffer(files["tokenizer.json"])
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._config: dict[str, Any] = json.loads(files.get("tokenizer_config.json", b"{}"))
        self._chat_template = _chat_template(files, self._config)
        self.vocabulary = Vocabulary(self._tokenizer)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text

    def decode_token(self, token_id: int) -> str:
        """One token's text, special tokens by name; bytes that are no whole character become U+FFFD."""
        return self.vocabulary.token_bytes(token_id).decode(errors="replace")

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """The prompt that asks for the assistant's next message. Raises `ValueError` without a chat template, and
        where the template refuses the messages."""
        if self._chat_template is None:
            raise ValueError("the model has no chat template")
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.globals["raise_exception"] = _raise_exception
        environment.filters["tojson"] = _to_json
        text = environment.from_string(self._chat_template).render(
            messages=messages, add_generation_prompt=True, **self._special_tokens()
        )
        return self.encode(text, add_special_tokens=False)

    def bad_words_token_ids(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Each word as it begins a text and as it follows a space, where those differ."""
        sequences = (
            tuple(self.encode(prefix + word.lstrip(), add_special_tokens=False))
            for word in words
            for prefix in ("", " ")
        )
        return tuple(dict.fromkeys(sequence for sequence in sequences if sequence))

    def _special_tokens(self) -> dict[str, str]:
        tokens = {}
        for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
            token = self._config.get(name)
            if token is not None:
                tokens[name] = token["content"] if isinstance(token, dict) else token
        return tokens


def _chat_template(files: Mapping[str, bytes], config: Mapping[str, Any]) -> str | None:
    if "chat_template.jinja" in files:
        return files["chat_template.jinja"].decode()
    template = config.get("chat_template")
    if isinstance(template, list):  # several by name
        template = next((entry["template"] for entry in template if entry["name"] == "default"), None)
    return template


def _raise_exception(message: str) -> None:
    raise ValueError(message)


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """JSON as templates expect it: jinja2's own filter escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)
