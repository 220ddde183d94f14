"""Serving: one request from its parsed body to the last byte of its response, the same for all APIs."""

from collections.abc import Sequence

from starlette.requests import HTTPConnection

from proa_gateway.admission.auth import Caller
from proa_gateway.admission.control import AdmissionControl
from proa_gateway.config import GatewayConfig
from proa_gateway.engines.attempts import request_timeout
from proa_gateway.engines.generation import Generation
from proa_gateway.engines.models import LoraRegistry, ServedModel
from proa_gateway.engines.pool import EnginePool
from proa_gateway.http.streaming import ResponseWriter
from proa_gateway.observability.metrics import GatewayMetrics
from proa_gateway.observability.telemetry import GatewayTracer
from proa_gateway.routing.hints import RoutingHints, hash_chain
from proa_gateway.routing.router import Router
from proa_gateway.serving.constraints import Constrainer
from proa_gateway.serving.ignored_fields import Notices
from proa_gateway.serving.job import ApiCall, Job, ServedRequest

TRACE_ID_HEADER = b"x-trace-id"


class Serving:
    """Serves all requests of a gateway that engines work for."""

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
        notices: Notices,
    ) -> None:
        self._admission = admission
        self._config = config
        self._pool = pool
        self._loras = loras
        self._constrainer = constrainer
        self._tracer = tracer
        self._metrics = metrics
        self._router = router
        self._notices = notices

    async def respond(self, call: ApiCall, connection: HTTPConnection, writer: ResponseWriter) -> None:
        """Serve one request. Raises `GatewayError` if nothing has been written yet. Cancellation aborts it.

        The connection's state has `caller`, `request_id` and `response_headers`, to which more are added until the
        response starts. For the access log it gets `trace_id`, `served`, and `error_type` also for a stream that fails.
        """
        state, headers = connection.state, connection.headers
        caller: Caller = state.caller
        fields, rank = call.fields, call.fields.priority or 0
        trace = self._tracer.start_request(headers, call.endpoint.route, caller.name)
        if trace.trace_id:
            state.trace_id = trace.trace_id
            state.response_headers.append((TRACE_ID_HEADER, trace.trace_id.encode()))
        served = ServedRequest(
            call=call,
            caller=caller,
            config=self._config,
            trace=trace,
            id=call.endpoint.id_prefix + state.request_id,
            requested_model=fields.model,
            session_id=headers.get("x-session-id") or call.session_id,
            rank=rank,
            priority=caller.priority if caller.name else rank,  # clients with a key cannot raise their own
            cache_salt=caller.cache_salt(fields.cache_salt),
            response_headers=state.response_headers,
        )
        state.served = served
        try:
            with served.observed(self._metrics):
                served.time_limit = request_timeout(headers, self._config.deadlines.request)
                await self._serve(served, writer)
        finally:
            if served.error_type:
                state.error_type = served.error_type

    async def _serve(self, served: ServedRequest, writer: ResponseWriter) -> None:
        call, trace = served.call, served.trace
        call.check()
        with self._admission.admit(served, call.num_prompts * call.num_choices) as guard:
            served.model = model = await guard.find_model()
            trace.set_request(operation=call.endpoint.operation, model=model.name, base_model=model.base_name)
            with trace.span("tokenize"):
                served.job = job = await call.prepare(model)
                served.hints = await self._routing_hints(served, job, model)
            trace.set_sampling(**job.trace_attributes)
            if job.ignored_fields:
                served.response_headers += self._notices.ignored(job.ignored_fields)
            guard.hold_images(job.num_image_bytes)
            if job.constraint is not None:
                with trace.span("grammar"):
                    served.grammar, warnings = await self._constrainer.grammar(job.constraint, model)
                served.response_headers += self._notices.warnings(warnings)
            with trace.span("admission"):
                job.check(model)
                await guard.wait_for_capacity(model.base_name, job.num_tokens, job.max_tokens)
            served.generation = generation = Generation(
                self._pool,
                model.base_name,
                self._loras,
                trace=trace,
                metrics=self._metrics,
                deadlines=self._config.deadlines,
                seconds=served.seconds_left,
            )
            served.sequences = generation.sequences
            try:
                await job.run(served, generation, writer)
            finally:
                generation.close()
        self._metrics.observe_request(call.endpoint.route, served.status, served.error_type)

    async def _routing_hints(self, served: ServedRequest, job: Job, model: ServedModel) -> Sequence[RoutingHints]:
        """One for each prompt."""
        if not job.uses_prefix_cache:
            return [RoutingHints(session_id=served.session_id, lora=model.lora)] * len(job.prompts)
        return [
            await self._router.make_hints(
                prompt.token_ids,
                hash_chain(model.info),
                cache_salt=served.cache_salt,
                session_id=served.session_id,
                lora=model.lora,
                images=prompt.images,
                embeds=prompt.embeds,
            )
            for prompt in job.prompts
        ]
