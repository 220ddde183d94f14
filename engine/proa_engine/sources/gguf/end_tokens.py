"""Which tokens end an answer. GGUF's metadata names one or two of them, the others are known by their texts."""

from proa_engine.sources.gguf.header import Header

_FIELDS = tuple(f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
# Ends of an assistant's turn in the chat templates of the supported families.
_TEXTS = frozenset({b"<|eot_id|>", b"<|eom_id|>", b"<|im_end|>", b"<|end|>", b"<end_of_turn>", b"<|end_of_text|>"})
CONTROL = 3  # of tokenizer.ggml.token_type


def end_token_ids(header: Header) -> list[int]:
    """Raises ValueError for an id that is no number."""
    ids = [header.fields[name] for name in _FIELDS if name in header.fields]
    if not all(type(each) is int for each in ids):
        raise ValueError(f"{header.path}: tokenizer.ggml.eos_token_id is not a token id")
    tokens, types = header.entries("tokenizer.ggml.tokens"), header.entries("tokenizer.ggml.token_type")
    texts = {number: text for number, (text, kind) in enumerate(zip(tokens, types, strict=False)) if kind == CONTROL}
    return list(dict.fromkeys([*ids, *(number for number, text in texts.items() if text in _TEXTS)]))
