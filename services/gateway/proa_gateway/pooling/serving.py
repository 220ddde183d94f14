"""PoolingServing: one pooling request from its parsed body to its response."""

import asyncio
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import orjson

from proa.contract import EngineCoreRequest, Lora, PoolingTask, SamplingParams
from proa_gateway.admission.auth import Caller
from proa_gateway.admission.control import AdmissionControl
from proa_gateway.config import GatewayConfig
from proa_gateway.engines.deadlines import request_timeout
from proa_gateway.engines.generation import Generation
from proa_gateway.engines.lora_registry import LoraRegistry
from proa_gateway.engines.model_registry import ServedModel
from proa_gateway.engines.pool import EnginePool
from proa_gateway.errors import InvalidRequest
from proa_gateway.http.streaming import Content, ResponseWriter
from proa_gateway.observability.metrics import GatewayMetrics
from proa_gateway.observability.telemetry import GatewayTracer
from proa_gateway.output.pooled import PooledOutput, PooledValues
from proa_gateway.pooling.fields import PoolingFields
from proa_gateway.pooling.inputs import PooledInput, check_inputs, divide
from proa_gateway.pooling.values import combine
from proa_gateway.routing.hints import RoutingHints
from proa_gateway.serving.envelope import Prompt, Usage
from proa_gateway.serving.refused_fields import Refused
from proa_gateway.serving.served_request import ServedRequest


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


MAX_RUNNING = 256
"""Engine requests of one HTTP request at the same time: those of others need not wait behind thousands of inputs."""
SENT_IN_A_TURN = 16
"""Engine requests that are sent between two turns of the event loop: 2 ms."""
MAX_RESULT_BYTES = 64 * 1024 * 1024
"""Values of one response, as float32. Numbers in JSON take five times as much."""

_NO_SAMPLING = SamplingParams()


class PoolingServing:
    """Serves all pooling requests of a gateway."""

    def __init__(
        self,
        config: GatewayConfig,
        *,
        admission: AdmissionControl,
        pool: EnginePool,
        loras: LoraRegistry,
        tracer: GatewayTracer,
        metrics: GatewayMetrics,
    ) -> None:
        self._config = config
        self._admission = admission
        self._pool = pool
        self._loras = loras
        self._tracer = tracer
        self._metrics = metrics

    async def respond(
        self,
        handler: PoolingHandler,
        caller: Caller,
        request_id: str,
        headers: Mapping[str, str],
        on_trace: Callable[[str], None],
        writer: ResponseWriter,
    ) -> None:
        """Serve one request. Raises `GatewayError` if nothing has been written yet. Cancellation aborts it.

        `on_trace` is called with the trace's id, if there is one, before the response starts.
        """
        trace = self._tracer.start_request(headers, handler.route, caller.name)
        if trace.trace_id:
            on_trace(trace.trace_id)
        request = handler.request
        context = PoolingContext(
            handler=handler,
            caller=caller,
            trace=trace,
            id=handler.id_prefix + request_id,
            session_id=headers.get("x-session-id") or request.session_id or request.user,
            num_prompts=min(handler.num_inputs, MAX_RUNNING),
        )
        with context.observed(self._metrics, slow_reader=self._config.deadlines.slow_reader):
            context.time_limit = request_timeout(headers, self._config.deadlines.request)
            outputs = await self._compute(context)
            assert context.model is not None
            envelope = Envelope(context.id, int(context.created), context.model.name, context.usage)
            await writer.send(await handler.content(outputs, envelope))
            self._metrics.observe_request(handler.route, context.status, context.error_type)

    async def _compute(self, context: PoolingContext) -> Sequence[PooledValues]:
        handler, limit = context.handler, self._config.max_pooling_inputs
        if handler.num_inputs > limit:
            message = f"{handler.num_inputs} inputs are above the limit of {limit} in one request."
            raise InvalidRequest(message, param=handler.input_param)
        with self._admission.admit(context, context.num_prompts) as guard:
            context.model = model = await guard.find_model()
            context.trace.set_request(operation=handler.operation, model=model.name, base_model=model.base_name)
            with context.trace.span("tokenize"):
                inputs = await handler.inputs(model)
            check_inputs(inputs, model.info, handler.input_param)
            context.prompts = [Prompt(each.token_ids) for each in inputs]
            num_tokens = self._count_tokens(context, inputs, model)
            with context.trace.span("admission"):
                await guard.wait_for_capacity(model.base_name, num_tokens, 0)
            context.generation = generation = Generation(
                self._pool,
                model.base_name,
                self._loras,
                trace=context.trace,
                metrics=self._metrics,
                deadlines=self._config.deadlines,
                seconds=context.seconds_left,
            )
            try:
                divided = [divide(each, model.info) for each in inputs]
                parts = [part for each in divided for part in each]
                return await combine(divided, await self._run(context, generation, parts, model.lora))
            finally:
                generation.close()

    def _count_tokens(self, context: PoolingContext, inputs: Sequence[PooledInput], model: ServedModel) -> int:
        """The tokens of all inputs. Raises `InvalidRequest` if they, or the values of the response, are too many."""
        handler, limit = context.handler, self._config.max_pooling_tokens
        num_tokens = sum(len(each.token_ids) for each in inputs)
        if num_tokens > limit:
            message = f"{num_tokens} tokens are above the limit of {limit} in one request."
            raise InvalidRequest(message, param=handler.input_param)
        num_bytes = 4 * sum(_num_values(each, model) for each in inputs)
        if num_bytes > MAX_RESULT_BYTES:
            message = f"The values take {num_bytes} bytes; the limit of one response is {MAX_RESULT_BYTES}."
            raise InvalidRequest(message, param=handler.input_param)
        return num_tokens

    async def _run(
        self, context: PoolingContext, generation: Generation, inputs: Sequence[PooledInput], lora: Lora | None
    ) -> list[PooledOutput]:
        """Return the outputs in the order of their inputs. Raises the error of the first that failed."""
        hints = RoutingHints(session_id=context.session_id, lora=lora)
        suffix = secrets.token_hex(4)  # clients choose ids, and engines refuse one that is in use
        outputs: list[PooledOutput] = []
        while True:
            room = MAX_RUNNING - generation.num_running
            for each in inputs[len(outputs) : len(outputs) + min(room, SENT_IN_A_TURN)]:
                id = f"{context.id}-{suffix}-{len(outputs)}"
                outputs.append(generation.add_pooled(_engine_request(id, each, context, lora), hints))
            generation.start()
            if len(outputs) < len(inputs) and room > SENT_IN_A_TURN:
                await asyncio.sleep(0)
            elif generation.finished:
                return outputs
            else:
                await generation.wait()


def _num_values(each: PooledInput, model: ServedModel) -> int:
    params, info = each.params, model.info
    match params.task:
        case PoolingTask.CLASSIFY | PoolingTask.TOKEN_CLASSIFY:
            size = max(1, len(info.labels))
        case PoolingTask.TOKEN_LOGPROBS:
            size = len(params.score_token_ids)
        case _:
            size = params.dimensions or info.embedding_size
    return size * (len(each.token_ids) if params.task.is_by_token else 1)


def _engine_request(id: str, each: PooledInput, context: PoolingContext, lora: Lora | None) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id=id,
        prompt_token_ids=each.token_ids,
        sampling_params=_NO_SAMPLING,
        pooling_params=each.params,
        priority=context.priority,
        cache_salt=context.caller.cache_salt(context.handler.request.cache_salt),
        arrival_time=context.created,
        lora_name=lora.name if lora is not None else "",
        lora_digest=lora.digest if lora is not None else "",
    )
