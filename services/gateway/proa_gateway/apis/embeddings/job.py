"""What engines get for requests of embeddings, classes and other values."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from proa.contract import ModelInfo, PoolingParams, PoolingTask
from proa_gateway.apis.embeddings.late_chunking import chunk_head, chunk_texts, encode_with_offsets
from proa_gateway.apis.embeddings.protocol import (
    ClassifyRequest,
    CohereEmbedRequest,
    CohereType,
    EmbeddingRequest,
    PoolingRequest,
    ValueFields,
)
from proa_gateway.apis.embeddings.render import ValueNames, render_chunks, render_classes, render_cohere, render_values
from proa_gateway.engines.models import ServedModel
from proa_gateway.errors import InvalidRequest
from proa_gateway.pooling.encoder import MAX_DESCRIBED
from proa_gateway.pooling.fields import (
    REFUSED_IN_CLASSIFY,
    REFUSED_IN_COHERE_EMBED,
    REFUSED_IN_EMBEDDINGS,
    REFUSED_IN_POOLING,
    InputFields,
)
from proa_gateway.pooling.inputs import Limit, PooledInput, check_task, dimensions_of, read_inputs, read_texts
from proa_gateway.pooling.job import PooledCall, PooledWork, pooled_call
from proa_gateway.serving.job import ApiSettings, Endpoint

EMBEDDINGS = Endpoint("/v1/embeddings", "embeddings", "embd-", REFUSED_IN_EMBEDDINGS)
POOLING = Endpoint("/pooling", "pooling", "pooling-", REFUSED_IN_POOLING)
CLASSIFY = Endpoint("/classify", "classify", "classify-", REFUSED_IN_CLASSIFY)
COHERE_EMBED = Endpoint("/v2/embed", "embeddings", "embd-", REFUSED_IN_COHERE_EMBED)

_EMBEDDING = ValueNames(object="embedding", field="embedding")
_POOLED = ValueNames(object="pooling", field="data")
_TASKS = {
    "token_embed": PoolingTask.TOKEN_EMBED,
    "embed": PoolingTask.EMBED,
    "classify": PoolingTask.CLASSIFY,
    "token_classify": PoolingTask.TOKEN_CLASSIFY,
}


def embeddings_call(body: EmbeddingRequest, settings: ApiSettings) -> PooledCall:
    read = _read_embeddings if body.late_chunking_params is None else _read_chunks
    return pooled_call(EMBEDDINGS, body, settings, partial(read, body, settings), **_inputs(body))


def pooling_call(body: PoolingRequest, settings: ApiSettings) -> PooledCall:
    return pooled_call(POOLING, body, settings, partial(_read_pooling, body, settings), **_inputs(body))


def classify_call(body: ClassifyRequest, settings: ApiSettings) -> PooledCall:
    return pooled_call(CLASSIFY, body, settings, partial(_read_classify, body, settings), **_inputs(body))


def cohere_call(body: CohereEmbedRequest, settings: ApiSettings) -> PooledCall:
    param = "inputs" if body.texts is None else "texts"
    num_inputs = len(body.texts or body.inputs or ())
    return pooled_call(COHERE_EMBED, body, settings, partial(_read_cohere, body), num_inputs=num_inputs, param=param)


def _inputs(body: InputFields) -> dict[str, Any]:
    return {"num_inputs": len(body.input or (None,)), "param": "messages" if body.input is None else "input"}


async def _read_embeddings(body: EmbeddingRequest, settings: ApiSettings, model: ServedModel) -> PooledWork:
    tasks = model.info.pooling_tasks
    has_only_tokens = PoolingTask.EMBED not in tasks and PoolingTask.TOKEN_EMBED in tasks
    task = PoolingTask.TOKEN_EMBED if has_only_tokens else PoolingTask.EMBED
    return await _read_values(body, settings, model, task, _EMBEDDING)


async def _read_pooling(body: PoolingRequest, settings: ApiSettings, model: ServedModel) -> PooledWork:
    default = next((task for task in _TASKS.values() if task in model.info.pooling_tasks), PoolingTask.EMBED)
    task = default if body.task is None else _TASKS[body.task]
    return await _read_values(body, settings, model, task, _POOLED)


async def _read_values(
    body: ValueFields, settings: ApiSettings, model: ServedModel, task: PoolingTask, names: ValueNames
) -> PooledWork:
    check_task(task, model.info)
    if body.encoding_format == "bytes" and len(body.input or (None,)) > MAX_DESCRIBED:
        message = f"bytes has a header that describes at most {MAX_DESCRIBED} inputs: use bytes_only."
        raise InvalidRequest(message, param="encoding_format")
    params = PoolingParams(task=task, dimensions=_dimensions(body, task, model.info), use_activation=body.activation)
    inputs = [PooledInput(ids, params) for ids in await read_inputs(body, model, settings)]
    return PooledWork(inputs, partial(render_values, body, names.head, has_rows=task.is_by_token))


async def _read_chunks(body: EmbeddingRequest, settings: ApiSettings, model: ServedModel) -> PooledWork:
    assert body.late_chunking_params is not None
    task, chunk_size = PoolingTask.TOKEN_EMBED, body.late_chunking_params.chunk_size
    check_task(task, model.info)
    texts = await chunk_texts(body, model)
    adds_tokens = body.add_special_tokens is not False
    encoded = await model.tokenizer.work_on(texts, lambda tokenizer: encode_with_offsets(tokenizer, texts, adds_tokens))
    params = PoolingParams(task=task, dimensions=_dimensions(body, task, model.info), use_activation=False)
    head = partial(chunk_head, [offsets for _, offsets in encoded], chunk_size, _EMBEDDING.object, _EMBEDDING.field)
    inputs = [PooledInput(token_ids, params) for token_ids, _ in encoded]
    return PooledWork(inputs, partial(render_chunks, body, head, chunk_size))


def _dimensions(body: ValueFields, task: PoolingTask, info: ModelInfo) -> int | None:
    if body.dimensions is not None and task in (PoolingTask.CLASSIFY, PoolingTask.TOKEN_CLASSIFY):
        raise InvalidRequest("dimensions is only for embeddings.", param="dimensions")
    return dimensions_of(body.dimensions, info, "dimensions")


async def _read_classify(body: ClassifyRequest, settings: ApiSettings, model: ServedModel) -> PooledWork:
    check_task(PoolingTask.CLASSIFY, model.info)
    params = PoolingParams(task=PoolingTask.CLASSIFY, use_activation=body.use_activation)
    inputs = [PooledInput(ids, params) for ids in await read_inputs(body, model, settings)]
    return PooledWork(inputs, partial(render_classes, model.info.labels))


async def _read_cohere(body: CohereEmbedRequest, model: ServedModel) -> PooledWork:
    check_task(PoolingTask.EMBED, model.info)
    dimensions = dimensions_of(body.output_dimension, model.info, "output_dimension")
    types: list[CohereType] = list(dict.fromkeys(body.embedding_types or ["float"]))
    size = dimensions or model.info.embedding_size
    if size % 8 and not {"binary", "ubinary"}.isdisjoint(types):
        message = f"binary and ubinary need embeddings of a multiple of 8 values; these have {size}."
        raise InvalidRequest(message, param="embedding_types")
    params = PoolingParams(task=PoolingTask.EMBED, dimensions=dimensions)
    prompt, texts = _task_prompt(body.input_type, model), body.texts or body.inputs or []
    texts = [prompt + text for text in texts] if prompt else texts
    token_ids = await read_texts(texts, model, _limit(body, model.info), param="texts")
    if body.truncate == "NONE" and body.max_tokens is not None:
        _check_lengths(token_ids, body.max_tokens, "inputs" if body.texts is None else "texts")
    return PooledWork([PooledInput(ids, params) for ids in token_ids], partial(render_cohere, body.texts, types))


def _limit(body: CohereEmbedRequest, info: ModelInfo) -> Limit:
    if body.truncate == "NONE":
        return Limit()
    kept = min(body.max_tokens or info.max_model_len, info.max_model_len)
    return Limit(kept, "left" if body.truncate == "START" else "right")


def _check_lengths(token_ids: Sequence[Sequence[int]], max_tokens: int, param: str) -> None:
    for index, ids in enumerate(token_ids):
        if len(ids) > max_tokens:
            message = f"Input {index} has {len(ids)} tokens, max_tokens is {max_tokens} and truncate NONE."
            raise InvalidRequest(message, param=param)


def _task_prompt(input_type: str | None, model: ServedModel) -> str:
    """Return the text that the model's configuration puts before inputs of this type."""
    prompts = model.tokenizer.task_prompts
    if input_type is None:
        return ""
    if input_type not in prompts:
        known = f"supported: {', '.join(sorted(prompts))}" if prompts else "the model's files have no prompts"
        raise InvalidRequest(f"Unsupported input_type {input_type!r}; {known}.", param="input_type")
    return prompts[input_type]
