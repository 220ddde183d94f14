"""How the responses with a model's values look."""

import asyncio
from base64 import b64encode
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import numpy as np
import orjson

from proa_gateway.apis.embeddings.late_chunking import chunk_embeddings
from proa_gateway.apis.embeddings.protocol import CohereType, ValueFields
from proa_gateway.http.streaming import Content
from proa_gateway.output.pooled import PooledValues
from proa_gateway.pooling.encoder import ValueEncoder, base64_text
from proa_gateway.pooling.job import PooledEnvelope
from proa_gateway.pooling.values import float_rows, joined, numbers, render_all


@dataclass(frozen=True, slots=True)
class ValueNames:
    """Names in the response: of the object that has an input's values, and of the field with the values."""

    object: str
    field: str

    def head(self, index: int) -> bytes:
        return b'{"index":%d,"object":"%s","%s":' % (index, self.object.encode(), self.field.encode())


async def render_values(
    body: ValueFields,
    head: Callable[[int], bytes],
    outputs: Sequence[PooledValues],
    envelope: PooledEnvelope,
    *,
    has_rows: bool,
) -> Content:
    """The values as they are, in the encoding that is asked for. `head`: of each input's object, up to the values.
    `has_rows`: these are lists of rows, even of one row."""
    encoding = body.encoding_format or "float"
    if encoding == "float":
        return envelope.list_of(await render_all(outputs, head, partial(float_rows, as_matrix=has_rows)))
    encoder = ValueEncoder(body.embed_dtype or "float32", body.endianness or "little", has_rows)
    if encoding == "base64":
        return envelope.list_of(await render_all(await encoder.encode(outputs), head, base64_text))
    return await encoder.binary(outputs, envelope.fields, envelope.usage, is_described=encoding == "bytes")


async def render_chunks(
    body: ValueFields,
    head: Callable[[int], bytes],
    chunk_size: int,
    outputs: Sequence[PooledValues],
    envelope: PooledEnvelope,
) -> Content:
    """Embeddings of the chunks of each text."""
    divide = partial(chunk_embeddings, chunk_size=chunk_size, normalize=body.activation is not False)
    chunks = [await asyncio.to_thread(divide, each) for each in outputs]
    return await render_values(body, head, chunks, envelope, has_rows=True)


async def render_classes(labels: Sequence[str], outputs: Sequence[PooledValues], envelope: PooledEnvelope) -> Content:
    def render(output: PooledValues) -> Iterator[tuple[bytes, int]]:
        values: list[float] = numbers(output.values).tolist()
        likeliest = values.index(max(values))
        label = labels[likeliest] if likeliest < len(labels) else None
        fields = {"label": label, "probs": values, "num_classes": len(values)}
        yield orjson.dumps(fields)[1:-1], len(values)

    return envelope.list_of(await render_all(outputs, lambda index: b'{"index":%d,' % index, render))


async def render_cohere(
    sent_texts: Sequence[str] | None,
    types: Sequence[CohereType],
    outputs: Sequence[PooledValues],
    envelope: PooledEnvelope,
) -> Content:
    """Embeddings in Cohere's form, in one or more types. `sent_texts`: of the request, which the response repeats."""
    embeddings = await joined(_cohere_lists(types, outputs))
    texts = {} if sent_texts is None else {"texts": sent_texts}
    units = {"input_tokens": envelope.usage.prompt_tokens, "image_tokens": 0}
    meta = {"api_version": {"version": "2"}, "billed_units": units}
    rest = orjson.dumps({**texts, "meta": meta, "response_type": "embeddings_by_type"})
    return Content(orjson.dumps({"id": envelope.id})[:-1] + b',"embeddings":' + embeddings + b"," + rest[1:])


def _cohere_lists(types: Sequence[CohereType], outputs: Sequence[PooledValues]) -> Iterator[tuple[bytes, int]]:
    """The object of lists by type, in parts with the number of values in each."""
    for number, name in enumerate(types):
        yield (b'{"%s":[' if not number else b'],"%s":[') % name.encode(), 0
        for index, output in enumerate(outputs):
            yield b"," * (index > 0) + orjson.dumps(_cohere_embedding(output.values, name)), len(output.values) // 4
    yield b"]}", 0


def _cohere_embedding(values: bytes, name: CohereType) -> list[float] | list[int] | str:
    if name == "base64":
        return b64encode(values).decode("ascii")
    floats = numbers(values)
    if name == "float":
        return cast(list[float], floats.tolist())
    packed = np.packbits(floats >= 0).astype(np.int16)
    return (packed - 128 if name == "binary" else packed).tolist()
