"""Small tokenizers of two families, trained on a few lines of text."""

import json
from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

_TEXT = [
    "The quick brown fox jumps over the lazy dog.",
    "Stop here. User: what is this? Assistant: naïve café, 12 €, 😀 and 👩‍👩‍👧.",
    "one two three four five six seven eight nine ten\n\nline after line\n",
]


def byte_level_tokenizer(*, vocab_size: int = 400) -> Tokenizer:
    """Byte-level BPE, as in GPT-2, Llama 3 and Qwen. Id 0 is the special token `<eos>`."""
    return Tokenizer.from_str(_byte_level(vocab_size))


@cache
def _byte_level(vocab_size: int) -> str:
    """The trained tokenizer as JSON. Training takes ten times as long as reading it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=["<eos>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(_TEXT * 3, trainer)
    tokenizer.add_tokens([AddedToken("<think>", special=False), AddedToken("added Ω token", special=False)])
    return tokenizer.to_str()


def metaspace_tokenizer(*, vocab_size: int = 400, strip: bool = True) -> Tokenizer:
    """BPE with byte fallback over words that begin with `▁`, as in Llama 2 (`strip`) and Gemma (not).

    Id 0 is the special token `<eos>`, ids 1 to 256 are the bytes.
    """
    tokenizer = Tokenizer(models.BPE(byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always" if strip else "never")
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if strip else parts)
    special_tokens = ["<eos>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=special_tokens, limit_alphabet=60, show_progress=False
    )
    tokenizer.train_from_iterator(_TEXT * 3, trainer)
    saved = json.loads(tokenizer.to_str())
    saved["added_tokens"] = saved["added_tokens"][:1]  # the trainer marks the bytes as special tokens
    return Tokenizer.from_str(json.dumps(saved))
