"""What engines get for embeddings and classes."""

from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import ClassVar, cast

import numpy as np
import orjson

from proa.contract import ModelInfo, PoolingParams, PoolingTask
from proa_gateway.apis.embeddings.protocol import (
    ClassifyRequest,
    CohereEmbedRequest,
    CohereType,
    PoolingRequest,
    ValueFields,
)
from proa_gateway.engines.model_registry import ServedModel
from proa_gateway.errors import InvalidRequest
from proa_gateway.http.streaming import Content
from proa_gateway.output.pooled import PooledValues
from proa_gateway.pooling.encoder import MAX_DESCRIBED, ValueEncoder, base64_text
from proa_gateway.pooling.fields import (
    REFUSED_IN_CLASSIFY,
    REFUSED_IN_COHERE_EMBED,
    REFUSED_IN_EMBEDDINGS,
    REFUSED_IN_POOLING,
)
from proa_gateway.pooling.inputs import Limit, PooledInput, check_task, dimensions_of, read_inputs, read_texts
from proa_gateway.pooling.serving import Envelope
from proa_gateway.pooling.values import float_rows, joined, numbers, render_all
from proa_gateway.serving.conversation_handler import ConversationSettings
from proa_gateway.serving.refused_fields import Refused

_TASKS = {
    "token_embed": PoolingTask.TOKEN_EMBED,
    "embed": PoolingTask.EMBED,
    "classify": PoolingTask.CLASSIFY,
    "token_classify": PoolingTask.TOKEN_CLASSIFY,
}


class EmbeddingHandler:
    """The `PoolingHandler` of `/v1/embeddings`."""

    route: ClassVar[str] = "/v1/embeddings"
    operation: ClassVar[str] = "embeddings"
    id_prefix: ClassVar[str] = "embd-"
    refused: ClassVar[Mapping[str, Refused]] = REFUSED_IN_EMBEDDINGS

    _object: ClassVar[str] = "embedding"
    _field: ClassVar[str] = "embedding"

    def __init__(self, request: ValueFields, settings: ConversationSettings) -> None:
        self._request = request
        self._settings = settings
        self._has_rows = False

    @property
    def request(self) -> ValueFields:
        return self._request

    @property
    def num_inputs(self) -> int:
        return len(self._request.input or (None,))

    @property
    def input_param(self) -> str:
        return "messages" if self._request.input is None else "input"

    async def inputs(self, model: ServedModel) -> list[PooledInput]:
        task = self._task(model.info)
        check_task(task, model.info)
        self._has_rows = task.is_by_token
        if self._request.encoding_format == "bytes" and self.num_inputs > MAX_DESCRIBED:
            message = f"bytes has a header that describes at most {MAX_DESCRIBED} inputs: use bytes_only."
            raise InvalidRequest(message, param="encoding_format")
        params = PoolingParams(
            task=task, dimensions=self._dimensions(task, model.info), use_activation=self._request.activation
        )
        return [PooledInput(ids, params) for ids in await read_inputs(self._request, model, self._settings)]

    async def content(self, outputs: Sequence[PooledValues], envelope: Envelope) -> Content:
        request = self._request
        encoding = request.encoding_format or "float"
        if encoding == "float":
            render = partial(float_rows, as_matrix=self._has_rows)
            return envelope.list_of(await render_all(outputs, self._head, render))
        encoder = ValueEncoder(request.embed_dtype or "float32", request.endianness or "little", self._has_rows)
        if encoding == "base64":
            return envelope.list_of(await render_all(await encoder.encode(outputs), self._head, base64_text))
        return await encoder.binary(outputs, envelope, is_described=encoding == "bytes")

    def _task(self, info: ModelInfo) -> PoolingTask:
        has_only_tokens = PoolingTask.EMBED not in info.pooling_tasks and PoolingTask.TOKEN_EMBED in info.pooling_tasks
        return PoolingTask.TOKEN_EMBED if has_only_tokens else PoolingTask.EMBED

    def _dimensions(self, task: PoolingTask, info: ModelInfo) -> int | None:
        dimensions = self._request.dimensions
        if dimensions is not None and task in (PoolingTask.CLASSIFY, PoolingTask.TOKEN_CLASSIFY):
            raise InvalidRequest("dimensions is only for embeddings.", param="dimensions")
        return dimensions_of(dimensions, info, "dimensions")

    def _head(self, index: int) -> bytes:
        return b'{"index":%d,"object":"%s","%s":' % (index, self._object.encode(), self._field.encode())


class PoolingEndpointHandler(EmbeddingHandler):
    """The `PoolingHandler` of `/pooling`."""

    route: ClassVar[str] = "/pooling"
    operation: ClassVar[str] = "pooling"
    id_prefix: ClassVar[str] = "pooling-"
    refused: ClassVar[Mapping[str, Refused]] = REFUSED_IN_POOLING

    _object: ClassVar[str] = "pooling"
    _field: ClassVar[str] = "data"

    def __init__(self, request: PoolingRequest, settings: ConversationSettings) -> None:
        super().__init__(request, settings)
        self._task_name = request.task

    def _task(self, info: ModelInfo) -> PoolingTask:
        if self._task_name is not None:
            return _TASKS[self._task_name]
        return next((task for task in _TASKS.values() if task in info.pooling_tasks), PoolingTask.EMBED)


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


class ClassifyHandler:
    """The `PoolingHandler` of `/classify`."""

    route: ClassVar[str] = "/classify"
    operation: ClassVar[str] = "classify"
    id_prefix: ClassVar[str] = "classify-"
    refused: ClassVar[Mapping[str, Refused]] = REFUSED_IN_CLASSIFY

    def __init__(self, request: ClassifyRequest, settings: ConversationSettings) -> None:
        self.request = request
        self._settings = settings
        self._labels: Sequence[str] = ()

    @property
    def num_inputs(self) -> int:
        return len(self.request.input or (None,))

    @property
    def input_param(self) -> str:
        return "messages" if self.request.input is None else "input"

    async def inputs(self, model: ServedModel) -> list[PooledInput]:
        check_task(PoolingTask.CLASSIFY, model.info)
        self._labels = model.info.labels
        params = PoolingParams(task=PoolingTask.CLASSIFY, use_activation=self.request.use_activation)
        return [PooledInput(ids, params) for ids in await read_inputs(self.request, model, self._settings)]

    async def content(self, outputs: Sequence[PooledValues], envelope: Envelope) -> Content:
        return envelope.list_of(await render_all(outputs, _head, self._render))

    def _render(self, output: PooledValues) -> Iterator[tuple[bytes, int]]:
        values: list[float] = numbers(output.values).tolist()
        likeliest = values.index(max(values))
        label = self._labels[likeliest] if likeliest < len(self._labels) else None
        fields = {"label": label, "probs": values, "num_classes": len(values)}
        yield orjson.dumps(fields)[1:-1], len(values)


def _head(index: int) -> bytes:
    return b'{"index":%d,' % index
