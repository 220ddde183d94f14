"""Completions: texts or token ids go on as they are, and choices are texts."""

from collections.abc import Sequence
from typing import Any, ClassVar

from proa_gateway.engines.model_registry import ServedModel
from proa_gateway.openai.protocol import CompletionRequest
from proa_gateway.openai.rendering import Choice, CompletionChoice, Envelope, Prompt, prompt_extras
from proa_gateway.openai.sampling import check_token_ids
from proa_gateway.output_processor import Delta


class CompletionHandler:
    """One request to `/v1/completions`; an `EndpointHandler`."""

    operation: ClassVar[str] = "text_completion"
    route: ClassVar[str] = "/v1/completions"
    prompt_param: ClassVar[str] = "prompt"
    stream_object: ClassVar[str] = "text_completion"
    object: ClassVar[str] = "text_completion"
    id_prefix: ClassVar[str] = "cmpl-"

    def __init__(self, request: CompletionRequest) -> None:
        self.request = request
        self.num_prompts = len(request.prompt)

    async def prompts(self, model: ServedModel) -> list[Prompt]:
        return [await self._prompt(prompt, model) for prompt in self.request.prompt]

    def context(self, prompt: Prompt) -> Sequence[int]:
        """A completion goes on from its prompt's text."""
        return prompt.token_ids

    def wants_tokens(self) -> bool:
        request = self.request
        return request.logprobs is not None or bool(request.return_token_ids) or request.prompt_logprobs is not None

    def choice(self, envelope: Envelope, index: int, prompt: Prompt, model: ServedModel) -> Choice:
        request = self.request
        return CompletionChoice(
            envelope,
            index,
            model.tokenizer.vocabulary,
            logprobs=request.logprobs is not None,
            token_ids=bool(request.return_token_ids),
            skip_special_tokens=request.skip_special_tokens is not False,
            echo=prompt if request.echo else None,
        )

    def extras(
        self, choices: list[dict[str, Any]], prompts: Sequence[Prompt], results: Sequence[Delta], model: ServedModel
    ) -> dict[str, Any]:
        """Fields beside the choices: none, the prompts' stand in the choices."""
        num_choices = len(choices) // len(prompts)
        for index, choice in enumerate(choices):
            choice |= prompt_extras(
                prompts[index // num_choices],
                results[index],
                model.tokenizer.vocabulary,
                logprobs=self.request.prompt_logprobs is not None,
                token_ids=bool(self.request.return_token_ids),
            )
        return {}

    async def _prompt(self, prompt: str | list[int], model: ServedModel) -> Prompt:
        if isinstance(prompt, str):
            special = self.request.add_special_tokens is not False
            return Prompt(await model.tokenizer.encode(prompt, add_special_tokens=special), prompt)
        check_token_ids("prompt", prompt, model.info)
        return Prompt(prompt, model.tokenizer.decode(prompt) if self.request.echo else None)
