"""Outcome: how a request ended, as metrics, its trace and the access log report it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from proa_gateway.output.text import FinishName


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a request to an endpoint that engines work for ended. Tokens are those up to its end, also if it failed."""

    route: str  # the path's template
    operation: str  # `gen_ai.operation.name` in OpenTelemetry's semantic conventions
    status: int = 200  # of HTTP; 499: the client disconnected
    error_type: str = ""  # the error's name; empty: there was none
    message: str = ""  # of the error
    duration: float = 0.0  # seconds since the arrival
    time_to_first_token: float | None = None  # seconds from the arrival; None: there was no output
    response_id: str = ""
    key: str = ""  # name of the API key; empty: it has none
    model: str = ""  # as the response names it; empty: the request was rejected before its model was known
    base_model: str = ""  # the engines' model, which differs from `model` for an adapter
    is_streamed: bool = False
    was_sent: bool = False  # to an engine
    num_choices: int = 1  # of each prompt
    max_tokens: int | None = None  # of a choice
    input_tokens: int = 0  # of all prompts
    cached_tokens: int = 0  # of the input tokens
    embedded_tokens: int = 0  # of the input tokens, those that embeddings stand for
    output_tokens: int = 0  # of all sequences
    longest_output: int = 0  # tokens of one sequence
    session: str = ""  # how the turn of a conversation came to its place in a KV cache; empty: it needs none
    session_wait: float = 0.0  # seconds
    finish_reasons: Sequence[FinishName] = ()  # of the sequences that finished
    finishes: Mapping[str, int] = field(default_factory=dict)
    """How many sequences ended for each of the reasons that the client received: a response that is not streamed has
    finish reasons only if all of its sequences finished. `client_disconnected`, `error`: there was none."""

    @property
    def log_fields(self) -> dict[str, Any]:
        """The request in the access log. `finish_reason` is that of all sequences, with commas between different
        ones."""
        first = self.time_to_first_token
        return {
            "stream": self.is_streamed,
            "prompt_tokens": self.input_tokens,
            "cached_tokens": self.cached_tokens,
            "output_tokens": self.output_tokens,
            "session": self.session or None,
            "session_wait_ms": round(1000 * self.session_wait, 1) or None,
            "first_token_ms": None if first is None else round(1000 * first, 1),
            "finish_reason": ",".join(dict.fromkeys(self.finish_reasons)) or None,
        }
