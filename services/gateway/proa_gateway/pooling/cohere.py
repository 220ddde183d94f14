"""CohereEmbedHandler: embeddings in Cohere's form, in one or more types."""

from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar, cast

import numpy as np
import orjson

from proa.contract import ModelInfo, PoolingParams, PoolingTask
from proa_gateway.engines.model_registry import ServedModel
from proa_gateway.errors import InvalidRequest
from proa_gateway.openai.refused_fields import Refused
from proa_gateway.pooled_output import PooledValues
from proa_gateway.pooling.encoding import Limit
from proa_gateway.pooling.handler import Envelope
from proa_gateway.pooling.inputs import PooledInput, check_task, dimensions_of, read_texts
from proa_gateway.pooling.protocol import CohereEmbedRequest, CohereType
from proa_gateway.pooling.refused import REFUSED_IN_COHERE_EMBED
from proa_gateway.pooling.values import joined, numbers
from proa_gateway.streaming import Content


class CohereEmbedHandler:
    """The `PoolingHandler` of `/v2/embed`."""

    route: ClassVar[str] = "/v2/embed"
    operation: ClassVar[str] = "embeddings"
    id_prefix: ClassVar[str] = "embd-"
    refused: ClassVar[Mapping[str, Refused]] = REFUSED_IN_COHERE_EMBED

    def __init__(self, request: CohereEmbedRequest) -> None:
        self.request = request
        self._texts = request.texts or request.inputs or []

    @property
    def num_inputs(self) -> int:
        return len(self._texts)

    @property
    def input_param(self) -> str:
        return "inputs" if self.request.texts is None else "texts"

    async def inputs(self, model: ServedModel) -> list[PooledInput]:
        check_task(PoolingTask.EMBED, model.info)
        request = self.request
        dimensions = dimensions_of(request.output_dimension, model.info, "output_dimension")
        self._check_types(dimensions or model.info.embedding_size)
        params = PoolingParams(task=PoolingTask.EMBED, dimensions=dimensions)
        prompt = _prompt(request.input_type, model)
        texts = [prompt + text for text in self._texts] if prompt else self._texts
        token_ids = await read_texts(texts, model, self._limit(model.info), param="texts")
        if request.truncate == "NONE" and request.max_tokens is not None:
            self._check_lengths(token_ids, request.max_tokens)
        return [PooledInput(ids, params) for ids in token_ids]

    async def content(self, outputs: Sequence[PooledValues], envelope: Envelope) -> Content:
        embeddings = await joined(self._render(outputs))
        texts = {} if self.request.texts is None else {"texts": self.request.texts}
        units = {"input_tokens": envelope.usage.prompt_tokens, "image_tokens": 0}
        meta = {"api_version": {"version": "2"}, "billed_units": units}
        rest = orjson.dumps({**texts, "meta": meta, "response_type": "embeddings_by_type"})
        return Content(orjson.dumps({"id": envelope.id})[:-1] + b',"embeddings":' + embeddings + b"," + rest[1:])

    def _types(self) -> list[CohereType]:
        return list(dict.fromkeys(self.request.embedding_types or ["float"]))

    def _check_types(self, size: int) -> None:
        if size % 8 and not {"binary", "ubinary"}.isdisjoint(self._types()):
            message = f"binary and ubinary need embeddings of a multiple of 8 values; these have {size}."
            raise InvalidRequest(message, param="embedding_types")

    def _limit(self, info: ModelInfo) -> Limit:
        if self.request.truncate == "NONE":
            return Limit()
        kept = min(self.request.max_tokens or info.max_model_len, info.max_model_len)
        return Limit(kept, "left" if self.request.truncate == "START" else "right")

    def _check_lengths(self, token_ids: Sequence[Sequence[int]], max_tokens: int) -> None:
        for index, ids in enumerate(token_ids):
            if len(ids) > max_tokens:
                message = f"Input {index} has {len(ids)} tokens, max_tokens is {max_tokens} and truncate NONE."
                raise InvalidRequest(message, param=self.input_param)

    def _render(self, outputs: Sequence[PooledValues]) -> Iterator[tuple[bytes, int]]:
        """The object of lists by type, in parts with the number of values in each."""
        for number, name in enumerate(self._types()):
            yield (b'{"%s":[' if not number else b'],"%s":[') % name.encode(), 0
            for index, output in enumerate(outputs):
                yield b"," * (index > 0) + orjson.dumps(_embedding(output.values, name)), len(output.values) // 4
        yield b"]}", 0


def _embedding(values: bytes, name: CohereType) -> list[float] | list[int] | str:
    if name == "base64":
        return b64encode(values).decode("ascii")
    floats = numbers(values)
    if name == "float":
        return cast(list[float], floats.tolist())
    packed = np.packbits(floats >= 0).astype(np.int16)
    return (packed - 128 if name == "binary" else packed).tolist()


def _prompt(input_type: str | None, model: ServedModel) -> str:
    prompts = model.tokenizer.task_prompts
    if input_type is None:
        return ""
    if input_type not in prompts:
        known = f"supported: {', '.join(sorted(prompts))}" if prompts else "the model's files have no prompts"
        raise InvalidRequest(f"Unsupported input_type {input_type!r}; {known}.", param="input_type")
    return prompts[input_type]
