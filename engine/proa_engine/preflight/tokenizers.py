"""Whether a folder has a tokenizer, and whether it can be the model's: decided from its files, of which the vocabulary
is read, not the merges.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from proa.tokenizer_files import CHAT_TEMPLATE_FILE
from proa_engine.models.folders import read_file, read_json

FILE = "tokenizer.json"
_OLDER_FILES = ("tokenizer.model", "vocab.json", "vocab.txt")


@dataclass(frozen=True, slots=True)
class TokenizerFacts:
    """`vocab_size`: the number of tokens of the tokenizer's own vocabulary; None if it lists none."""

    vocab_size: int | None
    has_chat_template: bool


class _Model(msgspec.Struct):
    vocab: dict[str, int] | list[Any] | None = None  # a list: by id


class _Tokenizer(msgspec.Struct):
    model: _Model


_decoder = msgspec.json.Decoder(_Tokenizer)


def read_tokenizer(folder: Path) -> TokenizerFacts:
    """Raises ValueError if the folder has no tokenizer.json, or one that is not a tokenizer."""
    data = read_file(folder / FILE)
    if data is None:
        raise ValueError(f"{folder} has no {FILE}; {_way_without(folder)}")
    try:
        vocab = _decoder.decode(data).model.vocab
    except msgspec.ValidationError as error:
        raise ValueError(f"{folder / FILE} is not a tokenizer: {error}") from error
    except msgspec.MsgspecError as error:
        reason = f"{error}; was it copied or downloaded in full?" if data else "it is empty"
        raise ValueError(f"{folder / FILE} is not valid JSON: {reason}") from error
    config = read_json(folder / "tokenizer_config.json") or {}
    size = None if vocab is None else 1 + max(vocab.values(), default=-1) if isinstance(vocab, dict) else len(vocab)
    return TokenizerFacts(size, bool(config.get("chat_template")) or (folder / CHAT_TEMPLATE_FILE).is_file())


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
