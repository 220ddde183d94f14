"""EmbeddingHandler and PoolingEndpointHandler: responses that have the model's values as they are."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import ClassVar

from proa.contract import ModelInfo, PoolingParams, PoolingTask
from proa_gateway.engines.model_registry import ServedModel
from proa_gateway.errors import InvalidRequest
from proa_gateway.openai.conversation_handler import ConversationSettings
from proa_gateway.openai.refused_fields import Refused
from proa_gateway.pooled_output import PooledValues
from proa_gateway.pooling.encoder import MAX_DESCRIBED, ValueEncoder, base64_text
from proa_gateway.pooling.handler import Envelope
from proa_gateway.pooling.inputs import PooledInput, check_task, dimensions_of, read_inputs
from proa_gateway.pooling.protocol import PoolingRequest, ValueFields
from proa_gateway.pooling.refused import REFUSED_IN_EMBEDDINGS, REFUSED_IN_POOLING
from proa_gateway.pooling.values import float_rows, render_all
from proa_gateway.streaming import Content

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
