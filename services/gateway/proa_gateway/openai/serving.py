"""Serving: one generation request from its parsed body to its last byte. The stages stand in `_respond`.

Knows neither FastAPI nor gRPC; what differs between chat and completions is in their `EndpointHandler`.
"""

import asyncio
import logging
import secrets
from collections.abc import Mapping, Sequence

from starlette.types import Send

from proa_gateway.admission.auth import Caller
from proa_gateway.admission.control import AdmissionControl
from proa_gateway.config import GatewayConfig
from proa_gateway.engines.deadlines import request_timeout
from proa_gateway.engines.generation import Generation
from proa_gateway.engines.model_registry import ModelRegistry, ServedModel
from proa_gateway.engines.pool import EnginePool
from proa_gateway.errors import (
    EngineUnavailable,
    GatewayError,
    InvalidRequest,
    QueueTimeout,
    RateLimited,
    ShuttingDown,
)
from proa_gateway.observability.metrics import GatewayMetrics
from proa_gateway.observability.telemetry import GatewayTracer
from proa_gateway.openai.answer import Answer
from proa_gateway.openai.protocol import CompletionRequest
from proa_gateway.openai.rendering import Prompt
from proa_gateway.openai.request_context import EndpointHandler, RequestContext
from proa_gateway.openai.sampling import check_context, max_tokens, sampling_params
from proa_gateway.routing.hints import RoutingHints
from proa_gateway.routing.router import Router
from proa_gateway.types import SamplingParams

# Errors that turn a request away before it has generated, as metrics call them; `AdmissionControl` counts its own.
_REJECTIONS: dict[type[GatewayError], str] = {
    EngineUnavailable: "no_engine",
    QueueTimeout: "queue_timeout",
    RateLimited: "rate_limit",
    ShuttingDown: "draining",
}
_log = logging.getLogger(__name__)


class Serving:
    """What all requests share."""

    def __init__(
        self,
        config: GatewayConfig,
        *,
        pool: EnginePool,
        models: ModelRegistry,
        tracer: GatewayTracer,
        metrics: GatewayMetrics,
        router: Router,
    ) -> None:
        self.admission = AdmissionControl(config, pool=pool, models=models, metrics=metrics)
        self._config = config
        self._pool = pool
        self._tracer = tracer
        self._metrics = metrics
        self._router = router

    async def respond(
        self, handler: EndpointHandler, caller: Caller, headers: Mapping[str, str], send: Send, send_event: Send
    ) -> None:
        """Answers over ASGI's `send`, and `send_event` for a stream that has begun. Raises `GatewayError` where nothing
        has been sent yet. Cancelling it aborts."""
        trace = self._tracer.start_request(headers, handler.route, caller.name)
        context = RequestContext(handler, caller, trace, handler.id_prefix + secrets.token_hex(12))
        context.session_id = headers.get("x-session-id") or handler.request.user
        self._metrics.requests_in_flight.inc()
        try:
            context.time_limit = request_timeout(headers, self._config.deadlines.request)
            await self._respond(context, send, send_event)
        except GatewayError as error:
            context.error, context.status = error, error.status
            if reason := _REJECTIONS.get(type(error)):
                self._metrics.observe_rejection(reason)
            raise
        except asyncio.CancelledError:
            context.status = 499
            self._metrics.observe_abort()
            raise
        except TimeoutError:
            context.status = 499
            self._metrics.observe_abort()
            _log.warning("%s: gave up on a client that takes nothing", context.id)
        except BaseException:
            context.status = 500
            raise
        finally:
            self._metrics.requests_in_flight.dec()
            context.report(self._metrics)
            if caller.name:
                usage = context.usage
                self._metrics.observe_key(
                    caller.name,
                    context.status,
                    input_tokens=usage.prompt_tokens if context.generation else 0,
                    output_tokens=usage.completion_tokens,
                )

    async def _respond(self, context: RequestContext, send: Send, send_event: Send) -> None:
        handler = context.handler
        request = handler.request
        num_choices = request.n or 1
        self._check(handler, num_choices)
        num_sequences = handler.num_prompts * num_choices
        with self.admission.visit(context, num_sequences) as visit:
            context.model = model = await self.admission.model(context, visit)
            params = sampling_params(request, model)
            self._describe(context, params[0])
            with context.trace.span("tokenize"):
                context.prompts = await handler.prompts(model)
                context.routing_hints = [
                    await self._routing_hints(context, prompt, model, params[0]) for prompt in context.prompts
                ]
            with context.trace.span("admission"):
                num_tokens = self._count_tokens(context.prompts, handler, model)
                await visit.turn(model.name, num_tokens, num_sequences, max_tokens(request))
            context.generation = generation = Generation(
                self._pool,
                model.name,
                trace=context.trace,
                metrics=self._metrics,
                deadlines=self._config.deadlines,
                seconds=context.seconds_left,
            )
            answer = Answer(context, generation, model, params, self._config)
            try:
                await (answer.stream(send, send_event) if request.stream else answer.complete(send))
            finally:
                generation.close()
            self._metrics.observe_request(handler.route, context.status, context.error_type)

    async def _routing_hints(
        self, context: RequestContext, prompt: Prompt, model: ServedModel, params: SamplingParams
    ) -> RoutingHints:
        # What an engine has cached is of no use where every token of the prompt must be computed.
        if params.prompt_logprobs is not None:
            return RoutingHints(session_id=context.session_id)
        salt = context.request.cache_salt or ""
        return await self._router.make_hints(
            prompt.token_ids, model.info.chain, cache_salt=salt, session_id=context.session_id
        )

    def _check(self, handler: EndpointHandler, num_choices: int) -> None:
        request = handler.request
        if handler.num_prompts * num_choices > self._config.max_choices:
            message = f"n times the number of prompts must not be above {self._config.max_choices}."
            raise InvalidRequest(message, param="n")
        if request.stream_options is not None and not request.stream:
            raise InvalidRequest("stream_options needs stream to be true.", param="stream_options")
        if request.stream and request.prompt_logprobs is not None:
            raise InvalidRequest("prompt_logprobs cannot be streamed.", param="prompt_logprobs")
        if request.max_tokens == 0 and not request.echo:
            message = "max_tokens must be at least 1; 0 is for completions with echo, which then score their prompt."
            raise InvalidRequest(message, param="max_tokens")
        if isinstance(request, CompletionRequest) and (request.best_of or num_choices) != num_choices:
            raise InvalidRequest("best_of is only supported where it equals n.", param="best_of")

    def _describe(self, context: RequestContext, params: SamplingParams) -> None:
        request = context.request
        context.trace.set_request(
            operation=context.handler.operation,
            model=context.model.name if context.model else "",
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

    def _count_tokens(self, prompts: Sequence[Prompt], handler: EndpointHandler, model: ServedModel) -> int:
        """Of all prompts together. Raises `InvalidRequest` where one does not fit."""
        for prompt in prompts:
            if not prompt.token_ids:
                raise InvalidRequest("The prompt has no tokens.", param=handler.prompt_param)
            limit = max_tokens(handler.request)
            check_context(len(prompt.token_ids), limit, model, handler.prompt_param)
        return sum(len(prompt.token_ids) for prompt in prompts)
