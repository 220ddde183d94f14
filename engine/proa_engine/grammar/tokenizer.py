"""make_tokenizer: llguidance's tokenizer, in which added tokens have private names in place of their texts.

llguidance 1.9.1 refuses the text of a special token wherever a grammar allows only one continuation: its mask then has
the token by which the tokenizer itself writes the text, and special tokens match no text. With private names, a
constant such as `<|im_end|>` is written with ordinary tokens, and `<[id]>` still names the token.
"""

import json
import logging
from collections.abc import Iterable

from llguidance import LLTokenizer

from proa.grammar import is_panic

GrammarTokenizer = LLTokenizer

_PRIVATE = "\ue000"  # a character for private use, which no text of a model has

_log = logging.getLogger(__name__)


def make_tokenizer(tokenizer_json: bytes, *, vocab_size: int, eos_token_ids: Iterable[int]) -> GrammarTokenizer | None:
    """Returns None, and logs why, if llguidance cannot read the tokenizer.

    `vocab_size` is the number of logits; its masks have at least as many bits. Holds the interpreter lock all the
    while: 1.2 s and 130 MB for 150,000 tokens.
    """
    text, eos = _with_private_names(tokenizer_json), sorted(eos_token_ids) or None
    try:
        try:
            return GrammarTokenizer(text, n_vocab=vocab_size, eos_token=eos)
        except ValueError:  # perhaps there are more tokens than logits
            return GrammarTokenizer(text, eos_token=eos)
    except BaseException as error:
        if not (isinstance(error, ValueError) or is_panic(error)):
            raise
        _log.warning("requests with grammars will be refused: the tokenizer cannot be read by llguidance: %s", error)
        return None


def _with_private_names(tokenizer_json: bytes) -> str:
    """The tokenizer with other texts for the added tokens that llguidance takes as special. Their ids are the same."""
    tokenizer = json.loads(tokenizer_json)
    names = {}
    for token in tokenizer.get("added_tokens") or ():
        text = token["content"]
        if token["special"] or (text.startswith("<") and text.endswith(">")):
            names[text] = token["content"] = f"{_PRIVATE}{token['id']}{_PRIVATE}"
            token["special"] = True
    model = tokenizer["model"]
    vocab = model.get("vocab")
    if isinstance(vocab, dict):
        model["vocab"] = {names.get(text, text): token_id for text, token_id in vocab.items()}
    elif isinstance(vocab, list):  # of Unigram
        model["vocab"] = [[names.get(text, text), score] for text, score in vocab]
    if (unknown := model.get("unk_token")) in names:
        model["unk_token"] = names[unknown]
    return json.dumps(tokenizer)
