"""ChatAnswer: how the response of `/v1/chat/completions` looks."""

from collections.abc import Sequence

from proa.text import Vocabulary
from proa_gateway.errors import GatewayError
from proa_gateway.openai.answer import CollectedChoice, EventOutlet, StreamedChoice
from proa_gateway.openai.chat_prompt import echoed_text, response_role
from proa_gateway.openai.delta_sinks import ChoiceCollector, ChoiceStream
from proa_gateway.openai.envelope import Envelope, Prompt, Usage
from proa_gateway.openai.protocol import ChatCompletionRequest
from proa_gateway.openai.rendering import ChatChoice, prompt_fields


class ChatAnswer:
    """The `Answer` of a chat completion."""

    def __init__(
        self, request: ChatCompletionRequest, envelope: Envelope, vocabulary: Vocabulary, prompt: Prompt
    ) -> None:
        self._request = request
        self._envelope = envelope
        self._vocabulary = vocabulary
        self._prompt = prompt

    @property
    def wants_tokens(self) -> bool:
        request = self._request
        return bool(request.logprobs or request.return_token_ids) or request.prompt_logprobs is not None

    def stream(self, index: int, prompt: Prompt, outlet: EventOutlet) -> StreamedChoice:
        return ChoiceStream(self._choice(index), outlet)

    def collect(self, index: int, prompt: Prompt) -> CollectedChoice:
        return ChoiceCollector(self._choice(index))

    def last_events(self, usage: Usage) -> bytes:
        return self._envelope.last_events(usage)

    def error_events(self, error: GatewayError) -> bytes:
        return self._envelope.error_events(error)

    def body(self, choices: Sequence[CollectedChoice], usage: Usage) -> bytes:
        request = self._request
        rendered = [choice.final() for choice in choices]
        fields = prompt_fields(
            self._prompt,
            choices[0].prompt_logprobs,
            self._vocabulary,
            logprobs=request.prompt_logprobs is not None,
            token_ids=bool(request.return_token_ids),
        )
        prompt_text = self._prompt.text if request.return_prompt_text else None
        return self._envelope.response(rendered, usage, **fields, prompt_text=prompt_text)

    def _choice(self, index: int) -> ChatChoice:
        request = self._request
        opening: dict[str, object] = {}
        if index == 0 and request.return_token_ids:
            opening["prompt_token_ids"] = list(self._prompt.token_ids)
        if index == 0 and request.return_prompt_text:
            opening["prompt_text"] = self._prompt.text
        return ChatChoice(
            self._envelope,
            index,
            self._vocabulary,
            role=response_role(request),
            echo=echoed_text(request),
            logprobs=request.token_names(self._vocabulary) if request.logprobs else None,
            token_ids=bool(request.return_token_ids),
            opening_fields=opening,
        )
