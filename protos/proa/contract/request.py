"""EngineCoreRequest: what an engine is asked to generate."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from proa.contract.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCoreRequest:
    """A request for one output sequence."""

    request_id: str
    prompt_token_ids: Sequence[int]
    sampling_params: SamplingParams
    priority: int = 0  # lower first
    cache_salt: str = ""  # requests share cached prefixes only with requests of the same salt
    trace_headers: Mapping[str, str] = field(default_factory=dict)  # W3C trace context
    resumed_token_ids: Sequence[int] = ()  # output that another engine has generated
    arrival_time: float = 0.0  # Unix seconds; 0: when the engine receives it
    client_index: int = field(default=0, metadata={"wire": False})  # the engine server's number of the caller
