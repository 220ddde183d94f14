"""ResponsesHandler: a request to `/v1/responses`."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from proa.contract import SamplingParams, TokenLogprobs
from proa_gateway.engines.model_registry import ServedModel
from proa_gateway.openai.conversation_handler import ConversationHandler, ConversationSettings
from proa_gateway.openai.envelope import Prompt
from proa_gateway.openai.refused_fields import Refused
from proa_gateway.responses.answer import Keep, ResponsesAnswer
from proa_gateway.responses.choice import ResponsesChoice
from proa_gateway.responses.convert import conversation_of
from proa_gateway.responses.items import Item
from proa_gateway.responses.output import LogprobsOf, OutputItems
from proa_gateway.responses.parts import Fields
from proa_gateway.responses.protocol import REFUSED, ResponsesRequest
from proa_gateway.responses.response import new_response


class ResponsesHandler(ConversationHandler):
    """The `EndpointHandler` of `/v1/responses`."""

    route: ClassVar[str] = "/v1/responses"
    operation: ClassVar[str] = "chat"
    id_prefix: ClassVar[str] = "resp_"
    prompt_param: ClassVar[str] = "input"
    refused: ClassVar[Mapping[str, Refused]] = REFUSED

    def __init__(
        self,
        body: ResponsesRequest,
        history: Sequence[Item],
        settings: ConversationSettings,
        keep: Keep,
        on_ignored: Callable[[Sequence[str]], None],
    ) -> None:
        """`history`: the items before those of the body. `keep` gets the response when it has ended, and one in the
        background also when it has started."""
        super().__init__(
            body.generation_request(),
            conversation_of(body, history),
            settings,
            max_tokens=body.max_output_tokens,
            logprobs=body.top_logprobs or 0 if body.wants_logprobs else None,
            on_ignored=on_ignored,
        )
        self._body = body
        self.keep = keep
        self._params = SamplingParams()

    @property
    def extra_fields(self) -> Mapping[str, Any]:
        return self._body.extra_fields

    @property
    def session_id(self) -> str | None:
        return self._body.session_id or self._body.prompt_cache_key or self._body.user

    def sampling_params(self, model: ServedModel) -> list[SamplingParams]:
        params = super().sampling_params(model)
        self._params = params[0]
        return params

    async def tokenize(self, model: ServedModel, *, limit: int | None = None) -> list[Prompt]:
        effort = self.conversation.reasoning_effort
        thinking = None if effort is None else effort != "none"
        self._fit_reasoning(model, thinking, thinking_field="reasoning.effort", effort_field="reasoning.effort")
        return await super().tokenize(model, limit=limit)

    def answer(self, id: str, created: int, model: ServedModel, prompts: Sequence[Prompt]) -> ResponsesAnswer:
        response = new_response(self._body, id=id, created=created, model=model.name, params=self._params)
        if self._body.background:
            self.keep(response)
        wants_logprobs = self._body.wants_logprobs
        items = OutputItems(
            includes_reasoning=self.conversation.includes_reasoning,
            logprobs=self._logprobs_of(model) if wants_logprobs else None,
            call_names=[function.call_name for function in self._body.functions],
        )
        message_format = self.message_format(model, prompts[0])
        return ResponsesAnswer(ResponsesChoice(response, items), message_format, self.keep, wants_tokens=wants_logprobs)

    def _logprobs_of(self, model: ServedModel) -> LogprobsOf:
        chat_logprobs = self._request.chat_logprobs(model.tokenizer.vocabulary)

        def render(entries: Sequence[TokenLogprobs]) -> list[Fields]:
            content: list[Fields] = chat_logprobs(entries)["content"]
            return content

        return render
