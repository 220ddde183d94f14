"""Serving: one request from its parsed body to the last byte of its response, the same for all APIs."""

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from starlette.requests import HTTPConnection

from proa_gateway.admission.auth import Caller
from proa_gateway.admission.control import AdmissionControl
from proa_gateway.admission.session_queue import Wait
from proa_gateway.config import GatewayConfig
from proa_gateway.engines.attempts import request_timeout
from proa_gateway.engines.generation import Generation
from proa_gateway.engines.models import LoraRegistry, ServedModel
from proa_gateway.engines.pool import EnginePool
from proa_gateway.errors import (
    DeadlineExceeded,
    EngineUnavailable,
    GatewayError,
    QueueTimeout,
    RateLimited,
    ShuttingDown,
)
from proa_gateway.http.streaming import ResponseWriter
from proa_gateway.observability.metrics import GatewayMetrics
from proa_gateway.observability.outcome import Outcome
from proa_gateway.observability.telemetry import GatewayTracer
from proa_gateway.output.text import EngineSequence
from proa_gateway.routing.policies import RoutingHints, hash_chain
from proa_gateway.routing.router import Router
from proa_gateway.serving.choices import Usage
from proa_gateway.serving.constraints import Constrainer
from proa_gateway.serving.ignored_fields import Notices
from proa_gateway.serving.job import Accepted, ApiCall, Job, Prepared, Running

TRACE_ID_HEADER = b"x-trace-id"
SESSION_HEADER = b"x-proa-session"
# Errors that reject a request before an engine has it, by their name in metrics; `AdmissionControl` counts its own.
_REJECTIONS: dict[type[GatewayError], str] = {
    EngineUnavailable: "no_engine",
    QueueTimeout: "queue_timeout",
    RateLimited: "rate_limit",
    ShuttingDown: "draining",
}


@dataclass(slots=True, eq=False)
class Progress:
    """How far a request has come, for its outcome. `Serving._serve` sets each part when it is known."""

    accepted: Accepted
    model: ServedModel | None = None
    job: Job | None = None
    wait: Wait | None = None  # for a place of its conversation
    running: Running | None = None

    def error_events(self, error: GatewayError) -> bytes:
        """Of a stream whose status was sent while it waited."""
        assert self.job is not None
        return self.job.error_events(self.accepted, error)

    def outcome(self, status: int, error: GatewayError | None) -> Outcome:
        """`status` of HTTP; 499: the client disconnected. `error`: what the request failed with, if it has a name."""
        accepted, model, job, running = self.accepted, self.model, self.job, self.running
        sequences: Sequence[EngineSequence] = ()
        usage, first = Usage(0, 0, 0), None
        if running is not None:
            sequences, usage, first = running.sequences, running.usage, running.generation.first_token_at
            error = error or running.generation.error  # of a stream that had begun
        error_type = {200: "", 499: "client_disconnected"}.get(status, "internal_error")
        reasons = [each.finish_reason for each in sequences]
        is_shown = status == 200 or accepted.call.is_streamed
        unfinished = "client_disconnected" if status == 499 else "error"
        return Outcome(
            route=accepted.call.endpoint.route,
            operation=accepted.call.endpoint.operation,
            status=status,
            error_type=error_type if error is None else error.code or type(error).__name__,
            message="" if error is None else error.message,
            duration=time.perf_counter() - accepted.arrived,
            time_to_first_token=None if first is None else first - accepted.arrived,
            response_id=accepted.id,
            key=accepted.caller.name,
            model="" if model is None else model.name,
            base_model="" if model is None else model.base_name,
            is_streamed=accepted.call.is_streamed,
            was_sent=running is not None,
            num_choices=accepted.call.num_choices,
            max_tokens=None if job is None else job.max_tokens,
            input_tokens=0 if job is None else job.num_tokens,
            cached_tokens=usage.cached_tokens,
            embedded_tokens=0 if job is None else sum(each.num_tokens for p in job.prompts for each in p.embeds),
            output_tokens=usage.completion_tokens,
            longest_output=max((each.num_tokens for each in sequences), default=0),
            session="" if self.wait is None else self.wait.outcome,
            session_wait=0.0 if self.wait is None else self.wait.seconds,
            finish_reasons=[reason for reason in reasons if reason is not None],
            finishes=Counter(reason if reason is not None and is_shown else unfinished for reason in reasons),
        )


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
        response starts. For the access log it gets `trace_id`, `outcome`, and `error_type` also for a stream that
        fails.
        """
        state, headers, metrics = connection.state, connection.headers, self._metrics
        caller: Caller = state.caller
        fields, rank = call.fields, call.fields.priority or 0
        trace = self._tracer.start_request(headers, call.endpoint.route, caller.name)
        if trace.trace_id:
            state.trace_id = trace.trace_id
            state.response_headers.append((TRACE_ID_HEADER, trace.trace_id.encode()))
        accepted = Accepted(
            call=call,
            caller=caller,
            trace=trace,
            id=call.endpoint.id_prefix + state.request_id,
            session_id=headers.get("x-session-id") or call.session_id,
            rank=rank,
            priority=caller.priority if caller.name else rank,  # clients with a key cannot raise their own
            cache_salt=caller.cache_salt(fields.cache_salt),
        )
        progress = Progress(accepted)
        status, failure = 200, None
        metrics.requests_in_flight.inc()
        try:
            await self._serve(progress, connection, writer)
        except GatewayError as error:
            failure = error
            if reason := _REJECTIONS.get(type(error)):
                metrics.observe_rejection(reason)
            if not writer.has_started:
                status = error.status
                raise
            await writer.end(progress.error_events(error))
        except asyncio.CancelledError:
            status = 499
            metrics.observe_abort()
            raise
        except BaseException:
            status = 500
            raise
        finally:
            metrics.requests_in_flight.dec()
            state.outcome = outcome = progress.outcome(status, failure)
            trace.finish(outcome)
            metrics.observe_outcome(outcome)
            if outcome.error_type:
                state.error_type = outcome.error_type

    async def _serve(self, progress: Progress, connection: HTTPConnection, writer: ResponseWriter) -> None:
        accepted, response_headers = progress.accepted, connection.state.response_headers
        call, trace = accepted.call, accepted.trace
        ends_at = accepted.arrived + request_timeout(connection.headers, self._config.deadlines.request)
        call.check()
        with self._admission.admit(accepted, ends_at) as guard:
            progress.model = model = await guard.find_model(call.fields.model)
            call.endpoint.check(model)
            if trace.is_recording:
                trace.set_request(operation=call.endpoint.operation, model=model.name, base_model=model.base_name)
            try:
                async with asyncio.timeout(ends_at - time.perf_counter()) as limit:  # images and audio may take long
                    with trace.span("tokenize"):
                        progress.job = job = await call.prepare(model)
                        hints = await self._routing_hints(accepted, job, model)
            except TimeoutError:
                if not limit.expired():
                    raise
                raise DeadlineExceeded("The prompt was not ready within the request's time.") from None
            if trace.is_recording:
                trace.set_parameters(job.parameters)
            if job.ignored_fields:
                response_headers += self._notices.ignored(job.ignored_fields)
            if num_bytes := job.num_image_bytes:
                guard.hold_images(num_bytes)
            grammar, warnings = None, list(job.warnings)
            if job.constraint is not None:
                with trace.span("grammar"):
                    grammar, unenforced = await self._constrainer.grammar(job.constraint, model)
                warnings += unenforced
            if warnings:
                response_headers += self._notices.warnings(warnings)
            with trace.span("admission") as span:
                job.check(model)
                keep_alive = self._config.sse_keep_alive_interval if call.is_streamed else 0.0
                async with writer.start_if_late(keep_alive):
                    may_wait = self._config.session_admission == "wait" and len(hints) == call.num_choices == 1
                    if may_wait and (sessions := self._router.sessions(model.base_name, hints[0])):
                        hashes, num_tokens = hints[0].block_hashes, job.num_tokens
                        wait = await guard.wait_for_place(model.base_name, sessions, hashes, num_tokens)
                        progress.wait = wait
                        response_headers.append((SESSION_HEADER, str(wait).encode()))
                        if span.is_recording():
                            span.set_attributes(wait.span_attributes())
                    await guard.wait_for_capacity(model.base_name, job.num_tokens, job.max_tokens)
            generation = Generation(
                self._pool,
                model.base_name,
                self._loras,
                trace=trace,
                metrics=self._metrics,
                deadlines=self._config.deadlines,
                seconds=ends_at - time.perf_counter(),
            )
            prepared = Prepared(model, job, hints, grammar)
            running = Running(
                accepted, prepared, generation, self._config, partial(self._notices.warn, response_headers)
            )
            progress.running = running
            try:
                await job.run(running, writer)
            finally:
                generation.close()
                guard.num_used_tokens = job.num_tokens + running.usage.completion_tokens

    async def _routing_hints(self, accepted: Accepted, job: Job, model: ServedModel) -> Sequence[RoutingHints]:
        """One for each prompt."""
        if not job.uses_prefix_cache:
            return [RoutingHints(session_id=accepted.session_id, lora=model.lora)] * len(job.prompts)
        return [
            await self._router.make_hints(
                prompt.token_ids,
                hash_chain(model.info),
                cache_salt=accepted.cache_salt,
                session_id=accepted.session_id,
                lora=model.lora,
                media=prompt.images or prompt.audios,
                embeds=prompt.embeds,
            )
            for prompt in job.prompts
        ]
