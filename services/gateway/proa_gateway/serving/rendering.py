"""Deltas to JSON: the interface, and what the forms share."""

from collections.abc import Sequence
from typing import Any, Protocol

from proa.contract import TokenLogprobs
from proa.text import Vocabulary
from proa_gateway.output.deltas import Delta
from proa_gateway.serving.envelope import Prompt, Usage
from proa_gateway.serving.logprobs import prompt_logprobs


class Choice(Protocol):
    """Renders one choice. Stateful: `opening` comes first, and deltas come in order."""

    text_head: bytes
    """The event of a delta that has only text is `text_head`, the text as a JSON string, `text_tail`."""
    text_tail: bytes
    begins_with_prompt: bool
    """The first event has more than its delta, so it must come from `event`."""

    def opening(self, usage: Usage | None = None) -> bytes:
        """The events before the first delta, or nothing."""
        ...

    def event(self, delta: Delta, usage: Usage | None = None) -> bytes: ...

    def final(self, delta: Delta) -> dict[str, Any]:
        """The choice of a response that is not streamed."""
        ...


def prompt_fields(
    prompt: Prompt, entries: Sequence[TokenLogprobs], vocabulary: Vocabulary, *, logprobs: bool, token_ids: bool
) -> dict[str, Any]:
    """vLLM's response fields about the prompt; null if not requested."""
    return {
        "prompt_logprobs": prompt_logprobs(entries, vocabulary) if logprobs else None,
        "prompt_token_ids": list(prompt.token_ids) if token_ids else None,
    }


def _finish_fields(delta: Delta) -> dict[str, Any]:
    if delta.finish_reason is None:
        return {"finish_reason": None}
    return {"finish_reason": delta.finish_reason, "stop_reason": delta.stop_reason}
