"""PoolingHandler: what differs between pooling endpoints."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import orjson

from proa_gateway.engines.model_registry import ServedModel
from proa_gateway.openai.envelope import Usage
from proa_gateway.openai.refused_fields import Refused
from proa_gateway.pooled_output import PooledValues
from proa_gateway.pooling.inputs import PooledInput
from proa_gateway.pooling.protocol import PoolingFields
from proa_gateway.streaming import Content


@dataclass(frozen=True, slots=True)
class Envelope:
    """What is around the results. `created`: Unix seconds."""

    id: str
    created: int
    model: str
    usage: Usage

    @property
    def fields(self) -> dict[str, str | int]:
        return {"id": self.id, "object": "list", "created": self.created, "model": self.model}

    def list_of(self, data: bytes) -> Content:
        """The response of vLLM's form whose `data` is this JSON."""
        usage = orjson.dumps(self.usage.to_dict())
        return Content(orjson.dumps(self.fields)[:-1] + b',"data":' + data + b',"usage":' + usage + b"}")


class PoolingHandler(Protocol):
    """One request to one endpoint. The methods are in the order of their calls."""

    route: ClassVar[str]
    operation: ClassVar[str]  # `gen_ai.operation.name` in OpenTelemetry's semantic conventions
    id_prefix: ClassVar[str]  # of the response's id
    refused: ClassVar[Mapping[str, Refused]]  # the fields that the request's class does not have

    @property
    def request(self) -> PoolingFields: ...

    @property
    def num_inputs(self) -> int:
        """At least as many as engine requests."""
        ...

    @property
    def input_param(self) -> str:
        """Request field that errors about the inputs name."""
        ...

    async def inputs(self, model: ServedModel) -> Sequence[PooledInput]:
        """The engine requests. Raises `InvalidRequest`."""
        ...

    async def content(self, outputs: Sequence[PooledValues], envelope: Envelope) -> Content:
        """The response. `outputs`: of the inputs, in their order. Raises `GenerationFailed`."""
        ...
