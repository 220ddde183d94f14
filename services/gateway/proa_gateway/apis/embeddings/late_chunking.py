"""Late chunking: an embedding for each chunk of a text, computed with the whole text as context.

The model computes the text's tokens at once, and a chunk's embedding is the mean of its tokens' (Günther et al., 2024,
"Late Chunking: Contextual Chunk Embeddings Using Long-Context Embedding Models").
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import orjson
from tokenizers import Tokenizer

from proa_gateway.apis.embeddings.protocol import EmbeddingRequest
from proa_gateway.engines.models import ServedModel
from proa_gateway.errors import InvalidRequest
from proa_gateway.output.pooled import PooledValues
from proa_gateway.pooling.inputs import Limit, fitting_texts
from proa_gateway.pooling.values import float32, matrix

Offsets = Sequence[tuple[int, int]]
"""Of each token: its first character in the text, and the one behind its last. Equal of one that the tokenizer adds."""


async def chunk_texts(body: EmbeddingRequest, model: ServedModel) -> list[str]:
    """Return the texts of a request with `late_chunking_params`. Raises `InvalidRequest` for inputs that cannot be
    divided, `ContextOverflow` for a text that is too long."""
    param = "messages" if body.input is None else "input"
    texts = [each for each in body.input or () if isinstance(each, str) and each]
    if body.input is None or len(texts) < len(body.input):
        raise InvalidRequest("late_chunking_params needs inputs that are texts with a character.", param=param)
    if body.truncate_prompt_tokens is not None:
        message = "late_chunking_params needs whole texts, without truncate_prompt_tokens."
        raise InvalidRequest(message, param="truncate_prompt_tokens")
    if body.encoding_format not in (None, "float", "base64"):
        message = "late_chunking_params needs an encoding_format with JSON: float or base64."
        raise InvalidRequest(message, param="encoding_format")
    await fitting_texts(texts, model, Limit(), model.info.max_model_len, param)
    return texts


def chunk_head(texts: Sequence[Offsets], chunk_size: int, object: str, field: str, index: int) -> bytes:
    """Return the JSON of a text's chunks, up to their values. `texts`: the tokens of each text. `object`, `field`:
    names in the JSON."""
    offsets = texts[index]
    chunks = [
        {
            "token_range": [start, min(start + chunk_size, len(offsets))],
            "char_range": text_range(offsets[start : start + chunk_size]),
        }
        for start in range(0, len(offsets), chunk_size)
    ]
    described = {"strategy": "fixed_tokens", "chunk_size": chunk_size, "input_tokens": len(offsets), "chunks": chunks}
    head: dict[str, Any] = {"index": index, "object": object, "late_chunking": described}
    return orjson.dumps(head)[:-1] + b',"%s":' % field.encode()


def encode_with_offsets(
    tokenizer: Tokenizer, texts: Sequence[str], add_special_tokens: bool
) -> list[tuple[Sequence[int], Offsets]]:
    encodings = tokenizer.encode_batch(list(texts), add_special_tokens=add_special_tokens)
    return [(encoding.ids, encoding.offsets) for encoding in encodings]


def text_range(offsets: Offsets) -> tuple[int, int] | None:
    """Return the range of characters that the tokens cover; None if they cover none."""
    in_text = [(start, end) for start, end in offsets if start < end]
    if not in_text:
        return None
    return min(start for start, _ in in_text), max(end for _, end in in_text)


def chunk_embeddings(tokens: PooledValues, chunk_size: int, *, normalize: bool) -> PooledValues:
    """Return the mean of every `chunk_size` rows, scaled to length 1 with `normalize`."""
    starts = np.arange(0, tokens.num_rows, min(chunk_size, tokens.num_rows))
    sums = np.add.reduceat(matrix(tokens), starts, axis=0, dtype=np.float64)
    if normalize:
        divisors = np.linalg.norm(sums, axis=1, keepdims=True)
        divisors[divisors == 0] = 1.0
    else:
        divisors = np.diff(starts, append=tokens.num_rows)[:, None].astype(np.float64)
    return PooledValues(float32(sums / divisors), len(starts))
