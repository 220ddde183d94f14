"""Request fields that are refused, that change nothing or that are unknown, and warnings about those, in headers.

A field of OpenAI, vLLM or SGLang that would change an answer is either in the request's class or here. A field in
neither is ignored, and a header of the response names it. docs/openai-fields.md has all of them.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote

from proa_gateway.errors import InvalidRequest, UnsupportedField
from proa_gateway.serving.fields import NEUTRAL, is_one_of

IGNORED_HEADER: Final = b"x-proa-ignored-fields"
MAX_EXTRA = 1024
MAX_NAMES = 20  # in the header
MAX_NAME_CHARACTERS = 64
WARNINGS_HEADER: Final = b"x-proa-warnings"
MAX_WARNINGS = 10  # in the header
MAX_WARNING_CHARACTERS = 200
MAX_LOGGED = 1000  # texts; clients choose them
_log = logging.getLogger(__name__)
NO_EFFECT: Mapping[str, str] = {
    "store": "answers are never stored",
    "metadata": "answers are never stored",
    "service_tier": "there is one tier",
    "prediction": "it is about speed; the engine chooses its drafts itself",
    "safety_identifier": "nothing is recorded about end users",
    "prompt_cache_retention": "cached blocks stay until their memory is needed",
    "prompt_cache_options": "cached blocks stay until their memory is needed",
    "guided_decoding_backend": "there is one backend",
    "early_stopping": "a beam search ends when no output can become better",
    "spaces_between_special_tokens": "no spaces are added between tokens",
    "stream_reasoning": "reasoning is streamed as it comes",
    "return_token_offsets": "it is about vLLM's render endpoints",
    "mm_payload": "it is about vLLM's render endpoints",
    "return_mm_kwargs": "it is about vLLM's render endpoints",
    "rid": "use request_id",
}


@dataclass(frozen=True, slots=True)
class Refused:
    """Why the field is refused, unless it has one of the `neutral` values, which change nothing."""

    reason: str  # ends the error's sentence; often what to use instead
    neutral: tuple[object, ...] = ()

    def accepts(self, value: object) -> bool:
        return is_one_of(value, (*NEUTRAL, *self.neutral))


_FUNCTIONS = Refused("use tools and tool_choice", neutral=("none", "auto"))
_PROCESSING = Refused("images are read as the model's own processor reads them")
_TRANSFER = Refused("the gateway itself chooses the engines for prefill and decode")
_LORA = Refused("name the adapter as the model")
_CHATS_ONLY = Refused("prompts have no chat template; use /v1/chat/completions")
THINKING_BUDGET = Refused("use /v1/chat/completions", neutral=(-1,))
_EXPERTS = Refused("the experts that were chosen are not recorded", neutral=(0,))

REFUSED: Mapping[str, Refused] = {
    # vLLM's
    "use_beam_search": Refused("use /v1/completions or /v1/chat/completions"),
    "prompt_embeds": Refused("use /v1/completions"),
    "logits_processors": Refused("code of clients is not run"),
    "watermarking": Refused("watermarks are not implemented"),
    "vllm_xargs": Refused("there are no extensions that could use it"),
    "kv_transfer_params": _TRANSFER,
    "ec_transfer_params": Refused("images are encoded in the engine that answers"),
    "return_weight_versions": Refused("the model's weights have no versions"),
    "routed_experts_prompt_start": _EXPERTS,
    "mm_processor_kwargs": _PROCESSING,
    "media_io_kwargs": _PROCESSING,
    # SGLang's
    "stop_regex": Refused("stop takes strings only"),
    "no_stop_trim": Refused("use include_stop_str_in_output"),
    "lora_path": _LORA,
    "lora_id": _LORA,
    "input_ids": Refused("/v1/completions takes token ids as its prompt"),
    "input_embeds": Refused("use prompt_embeds in /v1/completions"),
    "extra_key": Refused("use cache_salt"),
    "custom_params": Refused("code of clients is not run"),
    "custom_logit_processor": Refused("code of clients is not run"),
    "session_params": Refused("use session_id"),
    "return_hidden_states": Refused("hidden states stay in the engine"),
    "return_routed_experts": _EXPERTS,
    "bootstrap_host": _TRANSFER,
    "bootstrap_port": _TRANSFER,
    "bootstrap_room": _TRANSFER,
    # names of other APIs for what this one has
    "grammar": Refused("use structured_outputs"),
    "max_new_tokens": Refused("use max_tokens"),
    "min_new_tokens": Refused("use min_tokens"),
    "stop_sequences": Refused("use stop"),
    "num_beams": Refused("use use_beam_search and n", neutral=(1,)),
}

REFUSED_IN_CHAT: Mapping[str, Refused] = {
    **{name: rule for name, rule in REFUSED.items() if name != "use_beam_search"},
    "functions": _FUNCTIONS,
    "function_call": _FUNCTIONS,
    "modalities": Refused("answers are text", neutral=(["text"],)),
    "audio": Refused("answers are text"),
    "web_search_options": Refused("nothing is searched"),
    "moderation": Refused("nothing is moderated"),
    "best_of": Refused("use n", neutral=(1,)),
    "system": Refused("use a message with the role system"),
}

REFUSED_IN_COMPLETIONS: Mapping[str, Refused] = {
    **{name: rule for name, rule in REFUSED.items() if name not in ("use_beam_search", "prompt_embeds")},
    "suffix": Refused("text is not inserted before a suffix"),
    "top_logprobs": Refused("logprobs is the number of likeliest tokens here", neutral=(0,)),
    "max_completion_tokens": Refused("use max_tokens"),
    "chat_template": _CHATS_ONLY,
    "chat_template_kwargs": _CHATS_ONLY,
    "continue_final_message": _CHATS_ONLY,
    "documents": _CHATS_ONLY,
    "reasoning_effort": _CHATS_ONLY,
    "thinking_token_budget": THINKING_BUDGET,
    "tools": _CHATS_ONLY,
    "return_prompt_text": Refused("the prompt is the text that was sent; use echo"),
}


class Notices:
    """Response headers about parts of a request that have no effect. Each text is also logged, once."""

    def __init__(self) -> None:
        self._logged: set[str] = set()  # texts, at most `MAX_LOGGED`

    def check_extra(self, extra: Mapping[str, Any], refused: Mapping[str, Refused]) -> list[tuple[bytes, bytes]]:
        """The header that names ignored fields. `extra`: fields that the body's class does not have, `refused`: those
        that would change the answer. Raises `UnsupportedField` for the first of these, `InvalidRequest` for too
        many."""
        if len(extra) > MAX_EXTRA:
            raise InvalidRequest(f"The body has {len(extra)} unknown fields; the limit is {MAX_EXTRA}.")
        unknown: list[str] = []
        for name, value in extra.items():
            rule = refused.get(name)
            if rule is not None and not rule.accepts(value):
                raise UnsupportedField(f"{name} is not supported: {rule.reason}.", param=name)
            if rule is None and name not in NO_EFFECT:
                unknown.append(name)
        return self.ignored(unknown) if unknown else []

    def ignored(self, names: Iterable[str]) -> list[tuple[bytes, bytes]]:
        """The header that names these fields, if there are any."""
        short = [name[:MAX_NAME_CHARACTERS] for name in names]
        self._log_new("ignored the unknown request field %r; later requests with it are not logged", short)
        value = ", ".join(quote(name, safe=".", errors="replace") for name in short[:MAX_NAMES])
        return [(IGNORED_HEADER, value.encode())] if value else []

    def warnings(self, warnings: Sequence[str]) -> list[tuple[bytes, bytes]]:
        """The header with these warnings in printable ASCII, if there are any."""
        short = [_printable(warning[:MAX_WARNING_CHARACTERS]) for warning in warnings[:MAX_WARNINGS]]
        self._log_new("%s; later requests with it are not logged", short)
        return [(WARNINGS_HEADER, "; ".join(short).encode())] if short else []

    def warn(self, headers: list[tuple[bytes, bytes]], warning: str) -> None:
        """Add a warning about an output to the headers, which has no effect if they were sent."""
        headers += self.warnings([warning])

    def _log_new(self, message: str, texts: Iterable[str]) -> None:
        for text in texts:
            if text not in self._logged and len(self._logged) < MAX_LOGGED:
                self._logged.add(text)
                _log.warning(message, text)


def _printable(text: str) -> str:
    return "".join(character if " " <= character <= "~" else ascii(character)[1:-1] for character in text)
