"""ChatAnswer: how the response of `/v1/chat/completions` looks."""

from collections.abc import Sequence

from proa.text import Vocabulary
from proa_gateway.errors import GatewayError
from proa_gateway.openai.answer import CollectedChoice, EventOutlet, StreamedChoice
from proa_gateway.openai.chat_message import ChatMessageChoice
from proa_gateway.openai.chat_prompt import echoed_text, response_role
from proa_gateway.openai.delta_sinks import ChoiceCollector, ChoiceStream
from proa_gateway.openai.envelope import Envelope, Prompt, Usage
from proa_gateway.openai.logprobs import ChatLogprobs
from proa_gateway.openai.message_format import MessageFormat
from proa_gateway.openai.message_sinks import MessageCollector, MessageStream
from proa_gateway.openai.protocol import ChatCompletionRequest
from proa_gateway.openai.rendering import ChatChoice, prompt_fields
from proa_gateway.parsing.tool import NamedTool


class ChatAnswer:
    """The `Answer` of a chat completion."""

    def __init__(
        self,
        request: ChatCompletionRequest,
        envelope: Envelope,
        vocabulary: Vocabulary,
        prompt: Prompt,
        message_format: MessageFormat | None,
    ) -> None:
        """`message_format`: None: all text is content."""
        self._request = request
        self._envelope = envelope
        self._vocabulary = vocabulary
        self._prompt = prompt
        self._message_format = message_format

    @property
    def wants_tokens(self) -> bool:
        request = self._request
        return bool(request.logprobs or request.return_token_ids) or request.prompt_logprobs is not None

    def stream(self, index: int, prompt: Prompt, outlet: EventOutlet) -> StreamedChoice:
        if self._message_format is None:
            return ChoiceStream(self._choice(index), outlet)
        return MessageStream(self._message_choice(index), self._message_format, outlet)

    def collect(self, index: int, prompt: Prompt) -> CollectedChoice:
        if self._message_format is None:
            return ChoiceCollector(self._choice(index))
        return MessageCollector(self._message_choice(index), self._message_format)

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
        return ChatChoice(
            self._envelope,
            index,
            role=response_role(request),
            echo=echoed_text(request),
            logprobs=self._logprobs,
            token_ids=bool(request.return_token_ids),
            opening_fields=self._opening_fields(index),
        )

    def _message_choice(self, index: int) -> ChatMessageChoice:
        request = self._request
        return ChatMessageChoice(
            self._envelope,
            index,
            role=response_role(request),
            echo=echoed_text(request),
            logprobs=self._logprobs,
            token_ids=bool(request.return_token_ids),
            opening_fields=self._opening_fields(index),
            includes_reasoning=request.include_reasoning is not False,
            names_call=isinstance(request.tool_choice, NamedTool),
            continuous_usage=request.continuous_usage,
        )

    @property
    def _logprobs(self) -> ChatLogprobs | None:
        return self._request.chat_logprobs(self._vocabulary) if self._request.logprobs else None

    def _opening_fields(self, index: int) -> dict[str, object]:
        fields: dict[str, object] = {}
        if index == 0 and self._request.return_token_ids:
            fields["prompt_token_ids"] = list(self._prompt.token_ids)
        if index == 0 and self._request.return_prompt_text:
            fields["prompt_text"] = self._prompt.text
        return fields
