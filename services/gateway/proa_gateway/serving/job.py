"""A request from its body to its end: `ApiCall` before its model is known, `Job` prepared for it, `ServedRequest` while
it is served.
"""

import asyncio
import secrets
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from proa.contract import EngineCoreRequest, Grammar, PoolingParams, SamplingParams
from proa_gateway.admission.auth import Caller
from proa_gateway.config import GatewayConfig
from proa_gateway.engines.generation import Generation
from proa_gateway.engines.models import ServedModel
from proa_gateway.errors import EngineUnavailable, GatewayError, QueueTimeout, RateLimited, ShuttingDown
from proa_gateway.http.streaming import ResponseWriter
from proa_gateway.images.loader import ImageLoader
from proa_gateway.observability.metrics import GatewayMetrics
from proa_gateway.observability.telemetry import RequestTrace
from proa_gateway.output.text import EngineSequence
from proa_gateway.routing.hints import RoutingHints
from proa_gateway.serving.choices import Choice, Prompt, Usage
from proa_gateway.serving.constraints import OutputConstraint
from proa_gateway.serving.content import ContentFormat
from proa_gateway.serving.fields import RequestFields
from proa_gateway.serving.ignored_fields import Refused
from proa_gateway.serving.message_format import MessageFormats

# Errors that reject a request before an engine has it, by their name in metrics; `AdmissionControl` counts its own.
_REJECTIONS: dict[type[GatewayError], str] = {
    EngineUnavailable: "no_engine",
    QueueTimeout: "queue_timeout",
    RateLimited: "rate_limit",
    ShuttingDown: "draining",
}


@dataclass(frozen=True, slots=True)
class Endpoint:
    """`operation`: `gen_ai.operation.name` in OpenTelemetry's semantic conventions. `id_prefix`: of responses' ids.
    `refused`: fields that the body's class does not have, with the reasons."""

    route: str
    operation: str
    id_prefix: str
    refused: Mapping[str, Refused]


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiSettings:
    """The gateway's options that APIs use.

    `trusts_template`: requests may bring a chat template. `content_format`: of the contents that templates get.
    `images` None: images are refused. `plain_texts`: special tokens in the texts of chats are encoded as text.
    `includes_usage`: all events of streams have the usage. `tokens_as_ids`: log probabilities name tokens by their ids,
    unless the request says otherwise. `max_choices`: of all prompts of a request. `max_pooling_inputs` and
    `max_pooling_tokens`: of a request for pooled values.
    """

    formats: MessageFormats
    trusts_template: bool = False
    content_format: ContentFormat = "auto"
    images: ImageLoader | None = None
    plain_texts: bool = False
    includes_usage: bool = False
    tokens_as_ids: bool = False
    max_choices: int = 128
    max_pooling_inputs: int = 2048
    max_pooling_tokens: int = 1_048_576


@dataclass(frozen=True, kw_only=True)
class Job(ABC):
    """The input of engines and of the renderer, computed once from the body and the model. `ignored_fields`: paths of
    fields that the model does not use. `constraint`: what each output must match."""

    prompts: Sequence[Prompt]
    ignored_fields: Sequence[str] = ()
    constraint: OutputConstraint | None = None

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all prompts."""
        return sum(len(prompt.token_ids) for prompt in self.prompts)

    @property
    def num_image_bytes(self) -> int:
        """Bytes of images' pixels, and of embeddings."""
        pixels = sum(len(image.pixels) for prompt in self.prompts for image in prompt.images)
        return pixels + sum(len(embeds.values) for prompt in self.prompts for embeds in prompt.embeds)

    @property
    def max_tokens(self) -> int | None:
        """Limit of the tokens of each output. None: up to the end of the context."""
        return 0

    @property
    def uses_prefix_cache(self) -> bool:
        """Whether engines may use cached blocks of the prompts."""
        return False

    @property
    def trace_attributes(self) -> Mapping[str, Any]:
        """Arguments of `RequestTrace.set_sampling`."""
        return {}

    @abstractmethod
    def check(self, model: ServedModel) -> None:
        """Raises `InvalidRequest` for a prompt that the model cannot take."""

    @abstractmethod
    async def run(self, served: "ServedRequest", generation: Generation, writer: ResponseWriter) -> None:
        """Send the engine requests and write the response. Raises `GatewayError` if nothing has been written yet."""


@dataclass(frozen=True, kw_only=True)
class ApiCall(ABC):
    """One request to an endpoint, before its model is known. `session_id`: what the requests of one conversation have
    in common, for session affinity. `extra_fields`: of the body, which its class does not have, by their paths."""

    endpoint: Endpoint
    fields: RequestFields
    session_id: str | None
    extra_fields: Mapping[str, Any]
    num_prompts: int = 1

    @property
    def num_choices(self) -> int:
        """Number of choices of each prompt."""
        return 1

    @property
    def is_streamed(self) -> bool:
        return False

    @abstractmethod
    def check(self) -> None:
        """Check what needs no model. Raises `InvalidRequest`."""

    @abstractmethod
    async def prepare(self, model: ServedModel) -> Job:
        """Raises `InvalidRequest`, `UnsupportedTask` and `Overloaded`."""


@dataclass(slots=True, eq=False, kw_only=True)
class ServedRequest:
    """The state of one request. Filled in while it is served. `status` is the HTTP status; 499: the client
    disconnected."""

    call: ApiCall
    caller: Caller
    config: GatewayConfig
    trace: RequestTrace
    id: str
    requested_model: str | None
    session_id: str | None
    rank: int  # order among the caller's requests in the gateway's queue, smaller first
    priority: int  # the engine's scheduling priority
    cache_salt: str
    response_headers: list[tuple[bytes, bytes]]  # more of them, until the response starts
    arrived: float = field(default_factory=time.perf_counter)
    created: float = field(default_factory=time.time)  # Unix seconds
    suffix: str = field(default_factory=lambda: secrets.token_hex(4))  # clients choose ids, engines need unique ones
    time_limit: float = 0.0  # seconds from `arrived` to the end
    model: ServedModel | None = None
    job: Job | None = None
    hints: Sequence[RoutingHints] = ()  # one for each prompt
    grammar: Grammar | None = None  # of all outputs
    generation: Generation | None = None
    sequences: Sequence[EngineSequence] = ()  # of `generation`
    choices: Sequence[Choice] = ()  # of a request that generates
    error: GatewayError | None = None
    status: int = 200

    @property
    def num_prompts(self) -> int:
        return self.call.num_prompts

    @property
    def seconds_left(self) -> float:
        return self.arrived + self.time_limit - time.perf_counter()

    @property
    def usage(self) -> Usage:
        """The usage so far. A prompt counts once, however many choices it has."""
        sequences, prompts = self.sequences, self.job.prompts if self.job else ()
        firsts = sequences[:: max(1, len(sequences) // max(1, len(prompts)))]  # first choice of each prompt
        reasoning = [count for choice in self.choices if (count := choice.num_reasoning_tokens) is not None]
        return Usage(
            prompt_tokens=self.job.num_tokens if self.job else 0,
            completion_tokens=sum(sequence.num_tokens for sequence in sequences),
            cached_tokens=sum(sequence.num_cached_tokens for sequence in firsts),
            reasoning_tokens=sum(reasoning) if reasoning else None,
            image_tokens=sum(image.num_tokens for prompt in prompts for image in prompt.images),
        )

    @property
    def num_used_tokens(self) -> int:
        """Prompt and output tokens so far; 0 before the request is sent to an engine."""
        if self.generation is None:
            return 0
        usage = self.usage
        return usage.prompt_tokens + usage.completion_tokens

    @property
    def error_type(self) -> str:
        """The error's name in metrics and traces; empty if there was none."""
        if self.error is not None:
            return self.error.code or type(self.error).__name__
        return {200: "", 499: "client_disconnected"}.get(self.status, "internal_error")

    def log_fields(self) -> dict[str, Any]:
        """The request in the access log. `finish_reason` is that of all sequences, with commas between different
        ones."""
        usage, first = self.usage, self.generation.first_token_at if self.generation else None
        reasons = dict.fromkeys(each.finish_reason for each in self.sequences if each.finish_reason is not None)
        return {
            "stream": self.call.is_streamed,
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.cached_tokens,
            "output_tokens": usage.completion_tokens,
            "first_token_ms": None if first is None else round(1000 * (first - self.arrived), 1),
            "finish_reason": ",".join(reasons) or None,
        }

    def engine_request(
        self,
        index: int,
        prompt: Prompt,
        *,
        sampling_params: SamplingParams,
        pooling_params: PoolingParams | None = None,
    ) -> EngineCoreRequest:
        """`index` counts the requests to engines."""
        lora = self.model.lora if self.model else None
        return EngineCoreRequest(
            request_id=f"{self.id}-{self.suffix}-{index}",
            prompt_token_ids=prompt.token_ids,
            sampling_params=sampling_params,
            pooling_params=pooling_params,
            priority=self.priority,
            cache_salt=self.cache_salt,
            tenant=self.caller.tenant,
            arrival_time=self.created,
            lora_name=lora.name if lora is not None else "",
            lora_digest=lora.digest if lora is not None else "",
            images=prompt.images,
            prompt_embeds=prompt.embeds,
        )

    @contextmanager
    def observed(self, metrics: GatewayMetrics) -> Iterator[None]:
        """Serve the request in this context, once: it records errors, and reports metrics and the trace at the end."""
        metrics.requests_in_flight.inc()
        try:
            yield
        except GatewayError as error:
            self.error, self.status = error, error.status
            if reason := _REJECTIONS.get(type(error)):
                metrics.observe_rejection(reason)
            raise
        except asyncio.CancelledError:
            self.status = 499
            metrics.observe_abort()
            raise
        except BaseException:
            self.status = 500
            raise
        finally:
            metrics.requests_in_flight.dec()
            self._report(metrics)

    def _report(self, metrics: GatewayMetrics) -> None:
        usage, sequences, prompts = self.usage, self.sequences, self.job.prompts if self.job else ()
        first = self.generation.first_token_at if self.generation else None
        first_token = first - self.arrived if first is not None else None
        model, base_model = (self.model.name, self.model.base_name) if self.model else ("", "")
        self.trace.finish(
            status=self.status,
            error_type=self.error_type or None,
            message=self.error.message if self.error else "",
            response_id=self.id,
            response_model=model or None,
            input_tokens=usage.prompt_tokens,
            output_tokens=usage.completion_tokens,
            cached_tokens=usage.cached_tokens,
            embedded_tokens=sum(each.num_tokens for prompt in prompts for each in prompt.embeds) or None,
            finish_reasons=[each.finish_reason for each in sequences if each.finish_reason is not None],
            time_to_first_chunk=first_token,
        )
        metrics.observe_generation(
            operation=self.call.endpoint.operation,
            model=model,
            base_model=base_model,
            duration=time.perf_counter() - self.arrived,
            time_to_first_token=first_token,
            input_tokens=usage.prompt_tokens,
            output_tokens=usage.completion_tokens,
            longest_output=max((each.num_tokens for each in sequences), default=0),
            cached_tokens=usage.cached_tokens,
            num_choices=self.call.num_choices,
            max_tokens=self.job.max_tokens if self.job else None,
            error_type=self.error_type,
        )
        for reason, count in Counter(map(self._finish_reason, sequences)).items():
            metrics.observe_finish(model, base_model, reason, count)
        if self.caller.name:
            metrics.observe_key(
                self.caller.name,
                self.status,
                input_tokens=usage.prompt_tokens if self.generation else 0,
                output_tokens=usage.completion_tokens,
            )

    def _finish_reason(self, sequence: EngineSequence) -> str:
        """The finish reason that the client received. A response that is not streamed has one only if all of its
        sequences finished."""
        if sequence.finish_reason is not None and (self.status == 200 or self.call.is_streamed):
            return sequence.finish_reason
        return "client_disconnected" if self.status == 499 else "error"
