"""PoolingContext: the state of one pooling request."""

from dataclasses import dataclass

from proa_gateway.openai.served_request import ServedRequest
from proa_gateway.pooling.handler import PoolingHandler


@dataclass(slots=True, eq=False, kw_only=True)
class PoolingContext(ServedRequest):
    """`num_prompts`: the engine requests that run at the same time, at most. Parts of a long input count as one."""

    handler: PoolingHandler
    num_prompts: int

    @property
    def operation(self) -> str:
        return self.handler.operation

    @property
    def requested_model(self) -> str | None:
        return self.handler.request.model

    @property
    def rank(self) -> int:
        return self.handler.request.priority or 0
