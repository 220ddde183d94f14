"""The gRPC services: KEDA's external scaler, and what gateways tell each other.

A ScaledObject names what it scales in its trigger's metadata: `model`, the name under which the pool's engines serve
it; `target`, requests per replica; `role: prefill` for engines of that role. Every gateway gives the same answers,
because each counts what waits in all of them: KEDA may ask any.
"""

import math
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

import grpc

from proa_gateway.scaler.demand import Demand
from proa_gateway.scaler.v1 import externalscaler_pb2 as keda
from proa_gateway.scaler.v1 import externalscaler_pb2_grpc as keda_grpc
from proa_gateway.scaler.v1 import waiting_pb2, waiting_pb2_grpc

METRIC = "requests"
INTERVAL = 1.0  # seconds after which a change of the engines' load is noticed; what waits is noticed at once
Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True)
class Trigger:
    """What a ScaledObject asks for. `target`: requests per replica."""

    model: str
    target: float = 1.0
    prefill: bool = False  # count the requests of prefill engines instead

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, str]) -> Self:
        """Raises `ValueError`."""
        if not (model := metadata.get("model")):
            raise ValueError("the trigger's metadata needs the name of the model: model")
        if (role := metadata.get("role", "both")) not in ("both", "prefill", "decode"):
            raise ValueError(f"the role in the trigger's metadata must be both, prefill or decode, not {role!r}")
        text = metadata.get("target", "1")
        try:
            target = float(text)
        except ValueError:
            target = math.nan
        if not 0 < target < math.inf:
            raise ValueError(f"the target in the trigger's metadata must be a number of requests above 0, not {text!r}")
        return cls(model, target, role == "prefill")


class ExternalScaler(keda_grpc.ExternalScalerServicer):
    """Refuses a trigger that it cannot read with the status INVALID_ARGUMENT."""

    def __init__(self, demand: Demand) -> None:
        self._demand = demand

    async def IsActive(self, request: keda.ScaledObjectRef, context: Context) -> keda.IsActiveResponse:
        trigger = await _trigger(request, context)
        return keda.IsActiveResponse(result=self._value(trigger) > 0)

    async def StreamIsActive(
        self, request: keda.ScaledObjectRef, context: Context
    ) -> AsyncIterator[keda.IsActiveResponse]:
        trigger = await _trigger(request, context)
        sent: bool | None = None
        async for _ in self._demand.changes(INTERVAL):
            if (is_active := self._value(trigger) > 0) != sent:
                sent = is_active
                yield keda.IsActiveResponse(result=is_active)

    async def GetMetricSpec(self, request: keda.ScaledObjectRef, context: Context) -> keda.GetMetricSpecResponse:
        trigger = await _trigger(request, context)
        return keda.GetMetricSpecResponse(
            metricSpecs=[keda.MetricSpec(metricName=METRIC, targetSizeFloat=trigger.target)]
        )

    async def GetMetrics(self, request: keda.GetMetricsRequest, context: Context) -> keda.GetMetricsResponse:
        trigger = await _trigger(request.scaledObjectRef, context)
        value = keda.MetricValue(metricName=METRIC, metricValueFloat=self._value(trigger))
        return keda.GetMetricsResponse(metricValues=[value])

    def _value(self, trigger: Trigger) -> int:
        return self._demand.of(trigger.model, prefill=trigger.prefill)


class Waiting(waiting_pb2_grpc.WaitingServiceServicer):
    """`name` identifies this gateway."""

    def __init__(self, demand: Demand, name: str) -> None:
        self._demand = demand
        self._name = name

    async def Watch(
        self, request: waiting_pb2.WatchRequest, context: Context
    ) -> AsyncIterator[waiting_pb2.WatchResponse]:
        sent: Mapping[str, int] | None = None
        async for _ in self._demand.changes():
            if (waiting := dict(self._demand.waiting_here)) != sent:
                sent = waiting
                yield waiting_pb2.WatchResponse(gateway=self._name, waiting=waiting)


async def _trigger(request: keda.ScaledObjectRef, context: Context) -> Trigger:
    try:
        return Trigger.from_metadata(request.scalerMetadata)
    except ValueError as error:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        raise
