"""EngineCoreRequest: what an engine is asked to compute."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from proa.contract.image import Image
from proa.contract.pooling import PoolingParams
from proa.contract.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCoreRequest:
    """A request for one output sequence or, with `pooling_params`, for numbers computed from the prompt."""

    request_id: str
    prompt_token_ids: Sequence[int]
    sampling_params: SamplingParams
    priority: int = 0  # lower first
    cache_salt: str = ""  # requests share cached prefixes only with requests of the same salt
    trace_headers: Mapping[str, str] = field(default_factory=dict)  # W3C trace context
    resumed_token_ids: Sequence[int] = ()  # output that another engine has generated
    arrival_time: float = 0.0  # Unix seconds; 0: when the engine receives it
    pooling_params: PoolingParams | None = None  # instead of `sampling_params`, which are then the defaults
    lora_name: str = ""  # of a loaded adapter; empty: none
    lora_digest: str = ""  # that this adapter must have; empty: any
    images: tuple[Image, ...] = ()  # of the prompt, by ascending offset
    client_index: int = field(default=0, metadata={"wire": False})  # the engine server's number of the caller


def extra_keys(cache_salt: str, lora_name: str, lora_digest: str) -> tuple[str, ...]:
    """What the hash of each of a request's blocks has beside the tokens, see `proa.blocks`: nothing, the salt, or the
    salt, which may be empty, and the name and content of the adapter."""
    if lora_name:
        return cache_salt, lora_name, lora_digest
    return (cache_salt,) if cache_salt else ()
