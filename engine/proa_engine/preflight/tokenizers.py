"""Whether a folder has a tokenizer, and whether it can be the model's: decided from its files, of which the vocabulary
is read, not the merges.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from proa.chat_template import ModelTemplates, read_templates
from proa.tokenizer_files import CHAT_TEMPLATE_FILE, read_object, sampling_defaults
from proa_engine.sources.folders import read_tokenizer_files

FILE = "tokenizer.json"
_OLDER_FILES = ("vocab.json", "vocab.txt")


@dataclass(frozen=True, slots=True)
class TokenizerFacts:
    """`vocab_size`: the number of tokens of the tokenizer's own vocabulary; None if it lists none."""

    vocab_size: int | None


class _Model(msgspec.Struct):
    vocab: dict[str, int] | list[Any] | None = None  # a list: by id


class _Tokenizer(msgspec.Struct):
    model: _Model


_decoder = msgspec.json.Decoder(_Tokenizer)


def read_tokenizer(folder: Path) -> TokenizerFacts:
    """Raises ValueError if the folder has no tokenizer.json and no file that is converted to one, or one that is not a
    tokenizer."""
    files = read_tokenizer_files(folder)
    if not files:
        raise ValueError(f"{folder} has no {FILE}; {_way_without(folder)}")
    data = files[FILE]
    try:
        vocab = _decoder.decode(data).model.vocab
    except msgspec.ValidationError as error:
        raise ValueError(f"{folder / FILE} is not a tokenizer: {error}") from error
    except msgspec.MsgspecError as error:
        reason = f"{error}; was it copied or downloaded in full?" if data else "it is empty"
        raise ValueError(f"{folder / FILE} is not valid JSON: {reason}") from error
    size = None if vocab is None else 1 + max(vocab.values(), default=-1) if isinstance(vocab, dict) else len(vocab)
    return TokenizerFacts(size)


def read_prompt_templates(files: Mapping[str, bytes], folder: Path) -> ModelTemplates:
    """The chat templates in the tokenizer's files, of which all but tokenizer.json are checked. Raises ValueError for
    one that gateways cannot use."""
    try:
        sampling_defaults(files)
        read_object(files, "config_sentence_transformers.json")
        config = read_object(files, "tokenizer_config.json")
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error
    return read_templates(config, files.get(CHAT_TEMPLATE_FILE))


def check_vocabulary(tokenizer: TokenizerFacts, vocab_size: int | None, folder: Path) -> None:
    """Raise ValueError if the tokenizer makes tokens that a model with `vocab_size` embeddings does not have.

    Tokens that were added to a tokenizer's vocabulary may have none: those of images in text models (Gemma 3).
    """
    if tokenizer.vocab_size is not None and vocab_size is not None and tokenizer.vocab_size > vocab_size:
        raise ValueError(
            f"the tokenizer in {folder} has {tokenizer.vocab_size:,} tokens, but the model has vocab_size "
            f"{vocab_size:,}: it is the tokenizer of another model; give the model's own (tokenizer)"
        )


def _way_without(folder: Path) -> str:
    others = [name for name in _OLDER_FILES if (folder / name).exists()]
    if others:
        return f"convert its {others[0]} with transformers: AutoTokenizer.from_pretrained(…).save_pretrained(…)"
    return "give the folder of another one as tokenizer, or set skip_tokenizer_init to work with token ids alone"
