"""Chat completions: messages become one prompt by the model's template, and choices are messages."""

from collections.abc import Sequence
from typing import Any, ClassVar

from proa.chat_template import ChatTemplateError
from proa_gateway.engines.model_registry import ServedModel
from proa_gateway.errors import InvalidRequest
from proa_gateway.openai.protocol import ChatCompletionRequest, ChatMessage
from proa_gateway.openai.rendering import ChatChoice, Choice, Envelope, Prompt, prompt_extras
from proa_gateway.output_processor import Delta


class ChatHandler:
    """One request to `/v1/chat/completions`; an `EndpointHandler`."""

    operation: ClassVar[str] = "chat"
    route: ClassVar[str] = "/v1/chat/completions"
    prompt_param: ClassVar[str] = "messages"
    stream_object: ClassVar[str] = "chat.completion.chunk"
    object: ClassVar[str] = "chat.completion"
    id_prefix: ClassVar[str] = "chatcmpl-"
    num_prompts = 1

    def __init__(self, request: ChatCompletionRequest) -> None:
        self.request = request

    async def prompts(self, model: ServedModel) -> list[Prompt]:
        request = self.request
        if model.tokenizer.chat_template is None:
            raise InvalidRequest(f"The model {model.name!r} has no chat template: use /v1/completions.", param="model")
        generation_prompt = True if request.add_generation_prompt is None else request.add_generation_prompt
        try:
            text = model.tokenizer.chat_template.render(
                [_for_template(message) for message in request.messages],
                request.chat_template_kwargs,
                add_generation_prompt=generation_prompt,
            )
        except ChatTemplateError as error:
            raise InvalidRequest(
                f"The model's chat template refuses the messages: {error}", param="messages"
            ) from error
        # The template has written the special tokens already.
        token_ids = await model.tokenizer.encode(text, add_special_tokens=request.add_special_tokens or False)
        return [Prompt(token_ids, text)]

    def context(self, prompt: Prompt) -> Sequence[int]:
        """An answer begins a text of its own."""
        return ()

    def wants_tokens(self) -> bool:
        request = self.request
        return bool(request.logprobs or request.return_token_ids) or request.prompt_logprobs is not None

    def choice(self, envelope: Envelope, index: int, prompt: Prompt, model: ServedModel) -> Choice:
        return ChatChoice(
            envelope,
            index,
            model.tokenizer.vocabulary,
            logprobs=bool(self.request.logprobs),
            token_ids=bool(self.request.return_token_ids),
        )

    def extras(
        self, choices: list[dict[str, Any]], prompts: Sequence[Prompt], results: Sequence[Delta], model: ServedModel
    ) -> dict[str, Any]:
        """Fields beside the choices; here the prompt's stand at the top."""
        return prompt_extras(
            prompts[0],
            results[0],
            model.tokenizer.vocabulary,
            logprobs=self.request.prompt_logprobs is not None,
            token_ids=bool(self.request.return_token_ids),
        )


def _for_template(message: ChatMessage) -> dict[str, Any]:
    """What templates know: `developer` is OpenAI's newer word for `system`."""
    role = "system" if message.role == "developer" else message.role
    known = {"role": role, "content": message.content or ""}
    if message.name is not None:
        known["name"] = message.name
    return {**(message.model_extra or {}), **known}
