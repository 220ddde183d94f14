"""The stages of a request: `Accepted` with an API's `ApiCall`, `Prepared` with the `Job` that the call makes for a
model, `Running` until its last output.
"""

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from opentelemetry.util.types import AttributeValue

from proa.contract import EngineCoreRequest, Grammar, PoolingParams, SamplingParams
from proa_gateway.admission.auth import Caller
from proa_gateway.config import GatewayConfig
from proa_gateway.engines.generation import Generation
from proa_gateway.engines.models import ServedModel
from proa_gateway.http.streaming import ResponseWriter
from proa_gateway.images.loader import ImageLoader
from proa_gateway.observability.telemetry import RequestTrace
from proa_gateway.output.text import EngineSequence
from proa_gateway.routing.policies import RoutingHints
from proa_gateway.serving.choices import Prompt, Usage
from proa_gateway.serving.constraints import OutputConstraint
from proa_gateway.serving.content import ContentFormat
from proa_gateway.serving.fields import RequestFields
from proa_gateway.serving.ignored_fields import Refused
from proa_gateway.serving.message_format import MessageFormats


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
    def parameters(self) -> Mapping[str, AttributeValue | None]:
        """Those that a trace has, as for `RequestTrace.set_parameters`."""
        return {"stream": False}

    @abstractmethod
    def check(self, model: ServedModel) -> None:
        """Raises `InvalidRequest` for a prompt that the model cannot take."""

    @abstractmethod
    async def run(self, running: "Running", writer: ResponseWriter) -> None:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """A request whose body and key are valid, before its model is known. Times as `time.perf_counter` has them."""

    call: ApiCall
    caller: Caller
    trace: RequestTrace
    id: str  # of the response
    session_id: str | None  # what the requests of one conversation have in common, for session affinity
    rank: int  # order among the caller's requests in the gateway's queue, smaller first
    priority: int  # the engine's scheduling priority
    cache_salt: str
    arrived: float = field(default_factory=time.perf_counter)
    created: float = field(default_factory=time.time)  # Unix seconds
    suffix: str = field(default_factory=lambda: secrets.token_hex(4))  # clients choose ids, engines need unique ones


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request for its model, which engines can be sent."""

    model: ServedModel
    job: Job
    hints: Sequence[RoutingHints]  # one for each prompt
    grammar: Grammar | None  # of all outputs


@dataclass(frozen=True, slots=True)
class Running:
    """A request that has capacity. The job that runs adds the `sequences` that the response shows."""

    accepted: Accepted
    prepared: Prepared
    generation: Generation
    config: GatewayConfig
    sequences: list[EngineSequence] = field(default_factory=list)

    @property
    def usage(self) -> Usage:
        """The usage so far. A prompt counts once, however many choices it has."""
        job, sequences = self.prepared.job, self.sequences
        firsts = sequences[:: max(1, len(sequences) // max(1, len(job.prompts)))]  # first choice of each prompt
        reasoning = [count for each in sequences if (count := each.reasoning_tokens) is not None]
        return Usage(
            prompt_tokens=job.num_tokens,
            completion_tokens=sum(each.num_tokens for each in sequences),
            cached_tokens=sum(each.num_cached_tokens for each in firsts),
            reasoning_tokens=sum(reasoning) if reasoning else None,
            image_tokens=sum(image.num_tokens for prompt in job.prompts for image in prompt.images),
        )

    def engine_request(
        self,
        index: int,
        prompt: Prompt,
        *,
        sampling_params: SamplingParams,
        pooling_params: PoolingParams | None = None,
    ) -> EngineCoreRequest:
        """`index` counts the requests to engines."""
        accepted, lora = self.accepted, self.prepared.model.lora
        return EngineCoreRequest(
            request_id=f"{accepted.id}-{accepted.suffix}-{index}",
            prompt_token_ids=prompt.token_ids,
            sampling_params=sampling_params,
            pooling_params=pooling_params,
            priority=accepted.priority,
            cache_salt=accepted.cache_salt,
            tenant=accepted.caller.tenant,
            arrival_time=accepted.created,
            lora_name=lora.name if lora is not None else "",
            lora_digest=lora.digest if lora is not None else "",
            images=prompt.images,
            prompt_embeds=prompt.embeds,
        )
