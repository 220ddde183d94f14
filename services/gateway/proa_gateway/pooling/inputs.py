"""What a pooling request sends to engines: one prompt and its parameters for each engine request.

Special tokens that the tokenizer adds are never cut off.
"""

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, TypeVar

from tokenizers import Encoding, Tokenizer

from proa.contract import Image, ModelInfo, PoolingParams, PoolingTask
from proa_gateway.engines.models import ServedModel
from proa_gateway.errors import ContextOverflow, InvalidRequest, UnsupportedField, UnsupportedTask
from proa_gateway.pooling.fields import InputFields, TruncatedFields
from proa_gateway.serving.conversation import Conversation
from proa_gateway.serving.conversation_call import ConversationReader
from proa_gateway.serving.generation_request import GenerationRequest, check_token_ids
from proa_gateway.serving.job import ApiSettings
from proa_gateway.serving.prompt import CUT_SLACK, check_text_fits, media_parts

T = TypeVar("T")
GROUP_CHARACTERS: Final = 262_144
TASKS: dict[PoolingTask, str] = {
    PoolingTask.EMBED: "embeddings",
    PoolingTask.TOKEN_EMBED: "embeddings of tokens",
    PoolingTask.CLASSIFY: "classes",
    PoolingTask.TOKEN_CLASSIFY: "classes of tokens",
    PoolingTask.TOKEN_LOGPROBS: "log probabilities of tokens",
    PoolingTask.ALIGN: "alignments with audio",
}
"""What the tasks are called in errors."""


@dataclass(frozen=True, slots=True)
class Limit:
    """`max_tokens` of a prompt that are kept; None: all. `side`: where the others are cut off."""

    max_tokens: int | None = None
    side: Literal["left", "right"] = "right"

    def cut(self, token_ids: Sequence[int], num_other: int = 0) -> Sequence[int]:
        """`num_other`: tokens of the prompt beside these."""
        if self.max_tokens is None:
            return token_ids
        return self.cut_to(token_ids, max(0, self.max_tokens - num_other))

    def cut_to(self, token_ids: Sequence[int], num_kept: int) -> Sequence[int]:
        return token_ids[:num_kept] if self.side == "right" else token_ids[max(0, len(token_ids) - num_kept) :]


@dataclass(frozen=True, slots=True)
class PairIds:
    """`second_start`: tokens before the second text's segment; None: the tokenizer makes no segments."""

    token_ids: Sequence[int]
    second_start: int | None


def encode_texts(
    tokenizer: Tokenizer, texts: Sequence[str], limit: Limit, *, add_special_tokens: bool
) -> list[Sequence[int]]:
    encoded: list[Sequence[int]] = []
    for group in in_groups(texts, len):
        encodings = tokenizer.encode_batch_fast(group, add_special_tokens=add_special_tokens)
        encoded += [array("I", _cut_text(encoding, limit)) for encoding in encodings]
    return encoded


def encode_pairs(tokenizer: Tokenizer, pairs: Sequence[tuple[str, str]], limit: Limit) -> list[PairIds]:
    """The longer text of a pair is cut first, as in transformers."""
    groups = in_groups(pairs, lambda pair: len(pair[0]) + len(pair[1]))
    return [_cut_pair(encoding, limit) for group in groups for encoding in tokenizer.encode_batch_fast(group)]


def in_groups(texts: Sequence[T], size: Callable[[T], int]) -> Iterator[list[T]]:
    """Texts that are encoded at a time. Encodings take over a hundred bytes a token, until their ids are taken."""
    group: list[T] = []
    characters = 0
    for text in texts:
        if group and characters + size(text) > GROUP_CHARACTERS:
            yield group
            group, characters = [], 0
        group.append(text)
        characters += size(text)
    if group:
        yield group


def first_tokens(tokenizer: Tokenizer, texts: Sequence[str], num_tokens: int) -> list[str]:
    """Return each text up to the end of its `num_tokens`-th token. `num_tokens` is at least 1."""
    encodings = tokenizer.encode_batch(list(texts), add_special_tokens=False)
    return [
        text[: encoding.offsets[num_tokens - 1][1]] if len(encoding.ids) > num_tokens else text
        for text, encoding in zip(texts, encodings, strict=True)
    ]


def _cut_text(encoding: Encoding, limit: Limit) -> Sequence[int]:
    ids: list[int] = encoding.ids
    if limit.max_tokens is None or len(ids) <= limit.max_tokens:
        return ids
    start, end = _span(encoding.sequence_ids, 0)
    return limit.cut([*ids[:start], *limit.cut(ids[start:end], start + len(ids) - end), *ids[end:]])


def _cut_pair(encoding: Encoding, limit: Limit) -> PairIds:
    ids, types = list(encoding.ids), list(encoding.type_ids)
    if limit.max_tokens is not None and len(ids) > limit.max_tokens:
        sequence_ids = encoding.sequence_ids
        first, second = _span(sequence_ids, 0), _span(sequence_ids, 1)
        lengths = first[1] - first[0], second[1] - second[0]
        kept = _shares(*lengths, max(0, limit.max_tokens - len(ids) + sum(lengths)))
        for (start, end), num_kept in ((second, kept[1]), (first, kept[0])):
            ids[start:end] = limit.cut_to(ids[start:end], num_kept)
            types[start:end] = types[start : start + num_kept]
    return PairIds(array("I", ids), types.index(1) if 1 in types else None)


def _span(sequence_ids: Sequence[int | None], number: int) -> tuple[int, int]:
    """Return the start and end of a text's tokens. Tokens that the tokenizer adds belong to no text."""
    if number not in sequence_ids:
        return len(sequence_ids), len(sequence_ids)
    start = sequence_ids.index(number)
    return start, start + sequence_ids.count(number)


def _shares(first: int, second: int, room: int) -> tuple[int, int]:
    """Return how many tokens of each text fit. The longer text is cut until both are equal."""
    if first + second <= room:
        return first, second
    shorter, longer = min(first, second), max(first, second)
    if shorter > room // 2:
        shorter = room // 2
    longer = min(longer, room - shorter)
    return (shorter, longer) if first <= second else (longer, shorter)


@dataclass(frozen=True, slots=True)
class PooledInput:
    token_ids: Sequence[int]
    params: PoolingParams
    images: tuple[Image, ...] = ()  # with their pixels


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
    """Return the limit of an input's tokens. An input to embed may be longer than the context if the engine's options
    allow it."""
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


async def read_inputs(request: InputFields, model: ServedModel, settings: ApiSettings) -> Sequence[Sequence[int]]:
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


async def _chat_ids(request: InputFields, model: ServedModel, settings: ApiSettings, limit: Limit) -> Sequence[int]:
    if model.tokenizer.chat_template is None and request.chat_template is None:
        raise InvalidRequest(f"The model {model.name!r} has no chat template: use input.", param="messages")
    if (part := next(media_parts(request.messages or (), "messages"), None)) is not None:
        raise UnsupportedField(f"{part.param}: images and audio are not supported here, only text.", param=part.param)
    conversation = Conversation(
        messages=request.messages or (),
        template_kwargs=request.chat_template_kwargs or {},
        chat_template=request.chat_template,
        opens_message=bool(request.add_generation_prompt),
        continues_message=bool(request.continue_final_message),
    )
    fields = GenerationRequest.model_construct(add_special_tokens=request.add_special_tokens)
    reader = ConversationReader(conversation=conversation, request=fields, settings=settings)
    reader.check()
    return limit.cut((await reader.read(model)).prompt.token_ids)


def divide(each: PooledInput, info: ModelInfo) -> list[PooledInput]:
    """The engine requests of an input: one, or parts of the model's context length if it embeds longer inputs."""
    size, token_ids = info.max_model_len, each.token_ids
    if each.params.task is not PoolingTask.EMBED or len(token_ids) <= size:
        return [each]
    return [replace(each, token_ids=token_ids[start : start + size]) for start in range(0, len(token_ids), size)]
