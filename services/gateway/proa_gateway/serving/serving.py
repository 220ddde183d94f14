"""Serving: one generation request from its parsed body to the last byte of its response.

The same for all endpoints; what differs is in their `EndpointHandler`. `_generate` has the stages in their order.
"""

from collections.abc import Callable, Mapping

from proa.contract import SamplingParams
from proa_gateway.admission.auth import Caller
from proa_gateway.admission.control import AdmissionControl
from proa_gateway.config import GatewayConfig
from proa_gateway.engines.deadlines import request_timeout
from proa_gateway.engines.generation import Generation
from proa_gateway.engines.lora_registry import LoraRegistry
from proa_gateway.engines.model_registry import ServedModel
from proa_gateway.engines.pool import EnginePool
from proa_gateway.errors import InvalidRequest, UnsupportedTask
from proa_gateway.http.streaming import ResponseWriter
from proa_gateway.observability.metrics import GatewayMetrics
from proa_gateway.observability.telemetry import GatewayTracer
from proa_gateway.routing.hints import RoutingHints, hash_chain
from proa_gateway.routing.router import Router
from proa_gateway.serving.endpoint_handler import EndpointHandler
from proa_gateway.serving.envelope import Prompt
from proa_gateway.serving.generation_request import ALL_USAGE
from proa_gateway.serving.responder import Responder
from proa_gateway.serving.sampling import check_context
from proa_gateway.serving.served_request import RequestContext
from proa_gateway.serving.structured_outputs import Constrainer, constraint_of
from proa_gateway.serving.warnings import Warnings


class Serving:
    """Serves all generation requests of a gateway."""

    def __init__(
        self,
        config: GatewayConfig,
        *,
        admission: AdmissionControl,
        pool: EnginePool,
        loras: LoraRegistry,
        constrainer: Constrainer,
        tracer: GatewayTracer,
        metrics: GatewayMetrics,
        router: Router,
    ) -> None:
        self._admission = admission
        self._config = config
        self._pool = pool
        self._loras = loras
        self._constrainer = constrainer
        self._tracer = tracer
        self._metrics = metrics
        self._router = router
        self._warnings = Warnings()

    async def respond(
        self,
        handler: EndpointHandler,
        caller: Caller,
        request_id: str,
        headers: Mapping[str, str],
        response_headers: list[tuple[bytes, bytes]],
        on_trace: Callable[[str], None],
        on_error: Callable[[str], None],
        writer: ResponseWriter,
    ) -> None:
        """Serve one request. Raises `GatewayError` if nothing has been written yet. Cancellation aborts it.

        `on_trace` is called with the trace's id, if there is one, before the response starts; `on_error` with the
        error's type at the end, also of a stream that has failed after its start.
        """
        trace = self._tracer.start_request(headers, handler.route, caller.name)
        if trace.trace_id:
            on_trace(trace.trace_id)
        session_id = headers.get("x-session-id") or handler.session_id
        context = RequestContext(
            handler=handler,
            caller=caller,
            trace=trace,
            id=handler.id_prefix + request_id,
            session_id=session_id,
            response_headers=response_headers,
        )
        try:
            with context.observed(self._metrics, slow_reader=self._config.deadlines.slow_reader):
                context.time_limit = request_timeout(headers, self._config.deadlines.request)
                await self._generate(context, writer)
        finally:
            if context.error_type:
                on_error(context.error_type)

    async def _generate(self, context: RequestContext, writer: ResponseWriter) -> None:
        handler, request = context.handler, context.request
        num_sequences = handler.num_prompts * (request.n or 1)
        self._validate(handler, num_sequences)
        if self._config.enable_force_include_usage and request.stream:
            request.stream_options = ALL_USAGE
        if self._config.return_tokens_as_token_ids and request.return_tokens_as_token_ids is None:
            request.return_tokens_as_token_ids = True
        constraint = constraint_of(request)
        with self._admission.admit(context, num_sequences) as guard:
            context.model = model = await guard.find_model()
            if model.info.pooling_only:
                raise UnsupportedTask(f"The model {model.name!r} generates no text.", param="model")
            params = handler.sampling_params(model)
            context.max_tokens = params[0].max_tokens
            self._trace_request(context, model, params[0])
            with context.trace.span("tokenize"):
                context.prompts = await handler.tokenize(model)
                context.routing_hints = [
                    await self._routing_hints(context, prompt, model, params[0]) for prompt in context.prompts
                ]
            guard.hold_images(sum(len(image.pixels) for prompt in context.prompts for image in prompt.images))
            message = handler.message_constraint(model, context.prompts)
            if constraint is not None or (message is not None and message.constrains):
                with context.trace.span("grammar"):
                    warnings = await self._constrainer.constrain(params, constraint, message, model)
                context.response_headers += self._warnings.headers(warnings)
            with context.trace.span("admission"):
                num_tokens = self._count_tokens(context, model, params[0])
                await guard.wait_for_capacity(model.base_name, num_tokens, params[0].max_tokens)
            context.generation = generation = Generation(
                self._pool,
                model.base_name,
                self._loras,
                trace=context.trace,
                metrics=self._metrics,
                deadlines=self._config.deadlines,
                seconds=context.seconds_left,
            )
            responder = Responder(context, generation, model, params, self._config)
            try:
                await (responder.stream(writer) if request.stream else responder.complete(writer))
            finally:
                generation.close()
            self._metrics.observe_request(handler.route, context.status, context.error_type)

    def _validate(self, handler: EndpointHandler, num_sequences: int) -> None:
        request = handler.request
        if num_sequences > self._config.max_choices:
            message = f"n times the number of prompts must not be above {self._config.max_choices}."
            raise InvalidRequest(message, param="n")
        if request.stream_options is not None and not request.stream:
            raise InvalidRequest("stream_options needs stream to be true.", param="stream_options")
        if request.stream and request.prompt_logprobs is not None:
            raise InvalidRequest("prompt_logprobs cannot be streamed.", param="prompt_logprobs")
        handler.validate()

    def _trace_request(self, context: RequestContext, model: ServedModel, params: SamplingParams) -> None:
        request = context.request
        context.trace.set_request(
            operation=context.handler.operation,
            model=model.name,
            base_model=model.base_name,
            stream=bool(request.stream),
            n=request.n or 1,
            max_tokens=params.max_tokens,
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k or None,
            seed=request.seed,
            frequency_penalty=request.frequency_penalty,
            presence_penalty=request.presence_penalty,
            stop=request.stop or (),
        )

    async def _routing_hints(
        self, context: RequestContext, prompt: Prompt, model: ServedModel, params: SamplingParams
    ) -> RoutingHints:
        # Prompt logprobs need every prompt token computed, so cached blocks are not used.
        if params.prompt_logprobs is not None:
            return RoutingHints(session_id=context.session_id, lora=model.lora)
        return await self._router.make_hints(
            prompt.token_ids,
            hash_chain(model.info),
            cache_salt=context.caller.cache_salt(context.request.cache_salt),
            session_id=context.session_id,
            lora=model.lora,
            images=prompt.images,
        )

    def _count_tokens(self, context: RequestContext, model: ServedModel, params: SamplingParams) -> int:
        """The number of tokens in all prompts. Raises `InvalidRequest` if a prompt is empty or does not fit."""
        param = context.handler.prompt_param
        for prompt in context.prompts:
            if not prompt.token_ids:
                raise InvalidRequest("The prompt has no tokens.", param=param)
            check_context(len(prompt.token_ids), params.max_tokens, model, param)
        return sum(len(prompt.token_ids) for prompt in context.prompts)
