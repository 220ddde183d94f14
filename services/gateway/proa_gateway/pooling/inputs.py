"""What a pooling request sends to engines: one prompt and its parameters for each engine request."""

from collections.abc import Sequence
from dataclasses import dataclass

from proa.contract import ModelInfo, PoolingParams, PoolingTask
from proa_gateway.engines.model_registry import ServedModel
from proa_gateway.errors import ContextOverflow, InvalidRequest, UnsupportedField, UnsupportedTask
from proa_gateway.openai.conversation_handler import ConversationSettings
from proa_gateway.openai.prompt_images import image_parts
from proa_gateway.openai.prompt_text import CUT_SLACK, check_text_fits
from proa_gateway.openai.protocol import ChatCompletionRequest
from proa_gateway.openai.sampling import check_token_ids
from proa_gateway.openai.serving_chat import ChatHandler
from proa_gateway.pooling.encoding import Limit, encode_texts
from proa_gateway.pooling.protocol import InputFields, TruncatedFields

TASKS: dict[PoolingTask, str] = {
    PoolingTask.EMBED: "embeddings",
    PoolingTask.TOKEN_EMBED: "embeddings of tokens",
    PoolingTask.CLASSIFY: "classes",
    PoolingTask.TOKEN_CLASSIFY: "classes of tokens",
    PoolingTask.TOKEN_LOGPROBS: "log probabilities of tokens",
}
"""What the tasks are called in errors."""


@dataclass(frozen=True, slots=True)
class PooledInput:
    token_ids: Sequence[int]
    params: PoolingParams


def check_task(task: PoolingTask, info: ModelInfo) -> None:
    """Raises `UnsupportedTask`, which names what the model has."""
    if task not in info.pooling_tasks:
        raise UnsupportedTask(f"The model {info.model_name!r} has no {TASKS[task]}; {has(info)}.", param="model")


def has(info: ModelInfo) -> str:
    names = [*([] if info.pooling_only else ["generated text"]), *(TASKS[task] for task in info.pooling_tasks)]
    return f"it has {', '.join(names)}"


def limit_of(request: TruncatedFields, info: ModelInfo) -> Limit:
    """Raises `InvalidRequest` if more tokens are to be kept than the model takes."""
    kept, longest = request.truncate_prompt_tokens, info.max_model_len
    if kept is not None and kept > longest:
        message = (
            f"truncate_prompt_tokens must not be above the model's context length of {longest}, got {kept}. "
            "Please request a smaller truncation size."
        )
        raise InvalidRequest(message, param="truncate_prompt_tokens")
    if kept == 0:
        raise InvalidRequest("truncate_prompt_tokens must keep a token.", param="truncate_prompt_tokens")
    return Limit(longest if kept == -1 else kept, request.truncation_side or "right")


def longest_input(task: PoolingTask, info: ModelInfo) -> int:
    """In tokens. An input to embed may be longer than the model's context if the engine's options say so."""
    return max(info.max_model_len, info.max_embed_len) if task is PoolingTask.EMBED else info.max_model_len


def check_inputs(inputs: Sequence[PooledInput], info: ModelInfo, param: str) -> None:
    """Raises `InvalidRequest` for an input without tokens, `ContextOverflow` for one that is too long."""
    for index, each in enumerate(inputs):
        name = "the input" if len(inputs) == 1 else f"input {index}"
        if not each.token_ids:
            raise InvalidRequest(f"{name} has no tokens.".capitalize(), param=param)
        longest = longest_input(each.params.task, info)
        if len(each.token_ids) > longest:
            message = (
                f"This model's maximum context length is {longest} tokens. However, {name} has "
                f"{len(each.token_ids)} tokens. Please reduce the length of the input prompt, or set "
                "truncate_prompt_tokens."
            )
            raise ContextOverflow(message, param=param)


async def read_inputs(
    request: InputFields, model: ServedModel, settings: ConversationSettings
) -> Sequence[Sequence[int]]:
    """The token ids of each input. Raises `InvalidRequest`."""
    limit = limit_of(request, model.info)
    if request.input is None:
        return [await _chat_ids(request, model, settings, limit)]
    texts = [each for each in request.input if isinstance(each, str)]
    encoded = iter(await read_texts(texts, model, limit, add_special_tokens=request.add_special_tokens is not False))
    return [next(encoded) if isinstance(each, str) else _given_ids(each, model, limit) for each in request.input]


async def fitting_texts(
    texts: Sequence[str], model: ServedModel, limit: Limit, longest: int, param: str
) -> Sequence[str]:
    """The texts, without what truncation cuts off in any case. Raises `ContextOverflow` for one that cannot fit
    `longest` tokens, before it is encoded."""
    if limit.max_tokens is None:
        for text in texts:
            await check_text_fits(text, model, longest, param)
        return texts
    size = limit.max_tokens * model.tokenizer.longest_token + CUT_SLACK
    return [text[:size] if limit.side == "right" else text[-size:] for text in texts]


async def read_texts(
    texts: Sequence[str], model: ServedModel, limit: Limit, *, add_special_tokens: bool = True, param: str = "input"
) -> list[Sequence[int]]:
    texts = await fitting_texts(texts, model, limit, longest_input(PoolingTask.EMBED, model.info), param)
    return await model.tokenizer.work_on(
        texts, lambda tokenizer: encode_texts(tokenizer, texts, limit, add_special_tokens=add_special_tokens)
    )


def dimensions_of(kept: int | None, info: ModelInfo, param: str) -> int | None:
    """Raises `InvalidRequest` if more values are to be kept than the model's embeddings have."""
    if kept is not None and kept > info.embedding_size:
        message = f"{param} must not be above the model's {info.embedding_size}, got {kept}."
        raise InvalidRequest(message, param=param)
    return kept


def _given_ids(token_ids: list[int], model: ServedModel, limit: Limit) -> Sequence[int]:
    if min(token_ids) < 0 or max(token_ids) >= model.info.vocab_size:
        check_token_ids("input", token_ids, model.info)
    return limit.cut(token_ids)


async def _chat_ids(
    request: InputFields, model: ServedModel, settings: ConversationSettings, limit: Limit
) -> Sequence[int]:
    if model.tokenizer.chat_template is None and request.chat_template is None:
        raise InvalidRequest(f"The model {model.name!r} has no chat template: use input.", param="messages")
    fields = ("messages", "add_special_tokens", "continue_final_message", "chat_template", "chat_template_kwargs")
    if (part := next(image_parts(request.messages or (), "messages"), None)) is not None:
        raise UnsupportedField(f"{part.param}: images are not supported here, only text.", param=part.param)
    values = {name: getattr(request, name) for name in fields}
    opens = bool(request.add_generation_prompt)
    handler = ChatHandler(ChatCompletionRequest.model_construct(**values, add_generation_prompt=opens), settings)
    handler.validate()
    (prompt,) = await handler.tokenize(model)
    return limit.cut(prompt.token_ids)
