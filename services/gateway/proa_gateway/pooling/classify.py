"""ClassifyHandler: the probabilities of a model's labels."""

from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

import orjson

from proa.contract import PoolingParams, PoolingTask
from proa_gateway.engines.model_registry import ServedModel
from proa_gateway.openai.conversation_handler import ConversationSettings
from proa_gateway.openai.refused_fields import Refused
from proa_gateway.pooled_output import PooledValues
from proa_gateway.pooling.handler import Envelope
from proa_gateway.pooling.inputs import PooledInput, check_task, read_inputs
from proa_gateway.pooling.protocol import ClassifyRequest
from proa_gateway.pooling.refused import REFUSED_IN_CLASSIFY
from proa_gateway.pooling.values import numbers, render_all
from proa_gateway.streaming import Content


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
