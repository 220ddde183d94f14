"""The stages of a request: `Accepted` with an API's `ApiCall`, `Prepared` with the `Job` that the call makes for a
model, `Running` until its last output.
"""

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from opentelemetry.util.types import AttributeValue

from proa.contract import EngineCoreRequest, Grammar, PoolingParams, SamplingParams
from proa_gateway.admission.auth import Caller
from proa_gateway.audio.parts import AudioPartLoader
from proa_gateway.config import GatewayConfig
from proa_gateway.engines.generation import Generation
from proa_gateway.engines.models import ServedModel
from proa_gateway.errors import GatewayError, ModelNotFound
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
    """What serving reads of an endpoint that engines work for."""

    route: str  # the path's template
    operation: str  # `gen_ai.operation.name` in OpenTelemetry's semantic conventions
    id_prefix: str  # of responses' ids
    refused: Mapping[str, Refused]  # fields that the body's class does not have, with the reasons
    transcribes: bool = False  # each request has an audio, and models whose prompts need one serve no other endpoint

    def check(self, model: ServedModel) -> None:
        """Raises `ModelNotFound` for a model that does not serve the endpoint whatever a request has."""
        audios = model.info.audios
        if self.transcribes and audios is None:
            message = f"The model {model.name!r} reads no audio, so {self.route} does not have it."
            raise ModelNotFound(message, param="model")
        if not self.transcribes and audios is not None and audios.cross_attention:
            message = f"The model {model.name!r} only transcribes audio, so {self.route} does not have it."
            raise ModelNotFound(message, param="model")


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiSettings:
    """The gateway's options that APIs use."""

    formats: MessageFormats  # of reasoning and calls, by model
    trusts_template: bool = False  # requests may bring a chat template
    content_format: ContentFormat = "auto"  # of the contents that templates get
    images: ImageLoader | None = None  # None: images are refused
    audios: AudioPartLoader | None = None  # None: audio is refused
    plain_texts: bool = False  # special tokens in the texts of chats are encoded as text
    includes_usage: bool = False  # all events of streams have the usage
    tokens_as_ids: bool = False  # log probabilities name tokens by their ids, unless the request says otherwise
    max_choices: int = 128  # of all prompts of a request
    max_pooling_inputs: int = 2048  # of a request for pooled values
    max_pooling_tokens: int = 1_048_576  # of a request for pooled values


@dataclass(frozen=True, kw_only=True)
class Job(ABC):
    """The input of engines and of the renderer, computed once from the body and the model."""

    prompts: Sequence[Prompt]
    ignored_fields: Sequence[str] = ()  # paths of fields that the model does not use
    warnings: Sequence[str] = ()  # about what was changed for the model
    constraint: OutputConstraint | None = None  # what each output must match; None: anything

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all prompts."""
        return sum(len(prompt.token_ids) for prompt in self.prompts)

    @property
    def num_image_bytes(self) -> int:
        """Bytes of images' pixels, of audios' samples, and of embeddings."""
        media = sum(len(each.data) for prompt in self.prompts for each in prompt.images or prompt.audios)
        return media + sum(len(embeds.values) for prompt in self.prompts for embeds in prompt.embeds)

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

    def error_events(self, accepted: "Accepted", error: GatewayError) -> bytes:
        """The events of a stream that fails before any other event. Only of a job that streams."""
        raise NotImplementedError

    @abstractmethod
    async def run(self, running: "Running", writer: ResponseWriter) -> None:
        """Send the engine requests and write the response. Raises `GatewayError` if no event has been written yet."""


@dataclass(frozen=True, kw_only=True)
class ApiCall(ABC):
    """One request to an endpoint, before its model is known."""

    endpoint: Endpoint
    fields: RequestFields
    session_id: str | None  # what the requests of one conversation have in common, for session affinity
    extra_fields: Mapping[str, Any]  # of the body, which its class does not have, by their paths
    warnings: Sequence[str] = ()  # about parts of the body that are left out
    num_prompts: int = 1  # of the body

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
    """A request whose body and key are valid, before its model is known."""

    call: ApiCall
    caller: Caller
    trace: RequestTrace
    id: str  # of the response
    session_id: str | None  # of the header `x-session-id`, or the call's
    rank: int  # order among the caller's requests in the gateway's queue, smaller first
    priority: int  # the engine's scheduling priority
    cache_salt: str  # requests share cached blocks only with those of the same salt, the empty one included
    arrived: float = field(default_factory=time.perf_counter)  # by that clock
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
    warn: Callable[[str], None]  # adds to the headers of a response that has not begun, and logs
    sequences: list[EngineSequence] = field(default_factory=list)  # in the order of the response's choices or inputs

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
            audio_tokens=sum(audio.num_tokens for prompt in job.prompts for audio in prompt.audios),
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
            audios=prompt.audios,
        )
