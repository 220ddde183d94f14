"""LateChunkingHandler: an embedding for every chunk of a text, each computed with all of the text before the model.

The model computes the text's tokens at once, and a chunk's embedding is the mean of its tokens' (Günther et al., 2024,
"Late Chunking: Contextual Chunk Embeddings Using Long-Context Embedding Models").
"""

import asyncio
from collections.abc import Sequence
from functools import partial

import numpy as np
import orjson
from tokenizers import Tokenizer

from proa.contract import PoolingParams, PoolingTask
from proa_gateway.apis.embeddings.job import EmbeddingHandler
from proa_gateway.apis.embeddings.protocol import EmbeddingRequest
from proa_gateway.engines.model_registry import ServedModel
from proa_gateway.errors import InvalidRequest
from proa_gateway.http.streaming import Content
from proa_gateway.output.pooled import PooledValues
from proa_gateway.pooling.inputs import Limit, PooledInput, check_task, fitting_texts
from proa_gateway.pooling.serving import Envelope
from proa_gateway.pooling.values import float32, matrix
from proa_gateway.serving.conversation_handler import ConversationSettings

Offsets = Sequence[tuple[int, int]]
"""Of each token: its first character in the text, and the one behind its last. Equal of one that the tokenizer adds."""


class LateChunkingHandler(EmbeddingHandler):
    """The `PoolingHandler` of `/v1/embeddings` with `late_chunking_params`."""

    def __init__(self, request: EmbeddingRequest, settings: ConversationSettings) -> None:
        super().__init__(request, settings)
        assert request.late_chunking_params is not None
        self._chunk_size = request.late_chunking_params.chunk_size
        self._normalizes = self.request.activation is not False
        self._offsets: list[Offsets] = []

    async def inputs(self, model: ServedModel) -> list[PooledInput]:
        task = PoolingTask.TOKEN_EMBED
        check_task(task, model.info)
        texts = self._texts()
        await fitting_texts(texts, model, Limit(), model.info.max_model_len, self.input_param)
        adds_tokens = self.request.add_special_tokens is not False
        encoded = await model.tokenizer.work_on(
            texts, lambda tokenizer: encode_with_offsets(tokenizer, texts, adds_tokens)
        )
        self._offsets = [offsets for _, offsets in encoded]
        self._has_rows = True
        params = PoolingParams(task=task, dimensions=self._dimensions(task, model.info), use_activation=False)
        return [PooledInput(token_ids, params) for token_ids, _ in encoded]

    async def content(self, outputs: Sequence[PooledValues], envelope: Envelope) -> Content:
        divide = partial(chunk_embeddings, chunk_size=self._chunk_size, normalize=self._normalizes)
        chunks = [await asyncio.to_thread(divide, each) for each in outputs]
        return await super().content(chunks, envelope)

    def _texts(self) -> list[str]:
        """Raises `InvalidRequest` for what cannot be divided."""
        request = self.request
        texts = [each for each in request.input or () if isinstance(each, str) and each]
        if request.input is None or len(texts) < len(request.input):
            message = "late_chunking_params needs inputs that are texts with a character."
            raise InvalidRequest(message, param=self.input_param)
        if request.truncate_prompt_tokens is not None:
            message = "late_chunking_params needs whole texts, without truncate_prompt_tokens."
            raise InvalidRequest(message, param="truncate_prompt_tokens")
        if request.encoding_format not in (None, "float", "base64"):
            message = "late_chunking_params needs an encoding_format with JSON: float or base64."
            raise InvalidRequest(message, param="encoding_format")
        return texts

    def _head(self, index: int) -> bytes:
        offsets, size = self._offsets[index], self._chunk_size
        chunks = [
            {
                "token_range": [start, min(start + size, len(offsets))],
                "char_range": text_range(offsets[start : start + size]),
            }
            for start in range(0, len(offsets), size)
        ]
        described = {"strategy": "fixed_tokens", "chunk_size": size, "input_tokens": len(offsets), "chunks": chunks}
        head: dict[str, object] = {"index": index, "object": self._object, "late_chunking": described}
        return orjson.dumps(head)[:-1] + b',"%s":' % self._field.encode()


def encode_with_offsets(
    tokenizer: Tokenizer, texts: Sequence[str], add_special_tokens: bool
) -> list[tuple[Sequence[int], Offsets]]:
    encodings = tokenizer.encode_batch(list(texts), add_special_tokens=add_special_tokens)
    return [(encoding.ids, encoding.offsets) for encoding in encodings]


def text_range(offsets: Offsets) -> tuple[int, int] | None:
    """The characters of tokens; None if they have none."""
    in_text = [(start, end) for start, end in offsets if start < end]
    if not in_text:
        return None
    return min(start for start, _ in in_text), max(end for _, end in in_text)


def chunk_embeddings(tokens: PooledValues, chunk_size: int, *, normalize: bool) -> PooledValues:
    """The mean of every `chunk_size` rows, of length 1 with `normalize`."""
    starts = np.arange(0, tokens.num_rows, min(chunk_size, tokens.num_rows))
    sums = np.add.reduceat(matrix(tokens), starts, axis=0, dtype=np.float64)
    if normalize:
        divisors = np.linalg.norm(sums, axis=1, keepdims=True)
        divisors[divisors == 0] = 1.0
    else:
        divisors = np.diff(starts, append=tokens.num_rows)[:, None].astype(np.float64)
    return PooledValues(float32(sums / divisors), len(starts))
