"""Pooled requests: engines compute values from prompts instead of generating tokens."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import orjson

from proa.contract import PoolingTask, SamplingParams
from proa_gateway.engines.models import ServedModel
from proa_gateway.errors import InvalidRequest
from proa_gateway.http.streaming import Content, ResponseWriter
from proa_gateway.output.pooled import PooledOutput, PooledValues
from proa_gateway.pooling.fields import PoolingFields
from proa_gateway.pooling.inputs import PooledInput, check_inputs, divide
from proa_gateway.pooling.values import combine
from proa_gateway.serving.choices import Prompt, Usage
from proa_gateway.serving.job import ApiCall, ApiSettings, Endpoint, Job, Running

MAX_RUNNING = 256
"""Engine requests of one HTTP request at the same time: those of others need not wait behind thousands of inputs."""
SENT_IN_A_TURN = 16
"""Engine requests that are sent between two turns of the event loop: 2 ms."""
MAX_RESULT_BYTES = 64 * 1024 * 1024
"""Values of one response, as float32. Numbers in JSON take five times as much."""

_NO_SAMPLING = SamplingParams()


@dataclass(frozen=True, slots=True)
class PooledEnvelope:
    """The response's fields around its results."""

    id: str  # of the response
    created: int  # Unix seconds
    model: str  # as the response names it
    usage: Usage

    @property
    def fields(self) -> dict[str, str | int]:
        return {"id": self.id, "object": "list", "created": self.created, "model": self.model}

    def list_of(self, data: bytes) -> Content:
        """Return the response in vLLM's form, with this JSON as `data`."""
        usage = orjson.dumps(self.usage.to_dict())
        return Content(orjson.dumps(self.fields)[:-1] + b',"data":' + data + b',"usage":' + usage + b"}")


Render = Callable[[Sequence[PooledValues], PooledEnvelope], Awaitable[Content]]
"""Makes the response from the values of each input. Raises `GenerationFailed`."""


@dataclass(frozen=True, slots=True)
class PooledWork:
    """The inputs of a request for its model, and the function that renders their values."""

    inputs: Sequence[PooledInput]
    render: Render


@dataclass(frozen=True, kw_only=True)
class PooledCall(ApiCall):
    """A request for values that engines compute from prompts."""

    fields: PoolingFields
    settings: ApiSettings
    num_inputs: int  # at least as many as engine requests
    param: str  # the body's field that errors about inputs name
    read: Callable[[ServedModel], Awaitable[PooledWork]]  # raises `InvalidRequest`

    def check(self) -> None:
        limit = self.settings.max_pooling_inputs
        if self.num_inputs > limit:
            message = f"{self.num_inputs} inputs are above the limit of {limit} in one request."
            raise InvalidRequest(message, param=self.param)

    async def prepare(self, model: ServedModel) -> "PooledJob":
        work = await self.read(model)
        check_inputs(work.inputs, model.info, self.param)
        limit, num_tokens = self.settings.max_pooling_tokens, sum(len(each.token_ids) for each in work.inputs)
        if num_tokens > limit:
            message = f"{num_tokens} tokens are above the limit of {limit} in one request."
            raise InvalidRequest(message, param=self.param)
        num_bytes = 4 * sum(_num_values(each, model) for each in work.inputs)
        if num_bytes > MAX_RESULT_BYTES:
            message = f"The values take {num_bytes} bytes; the limit of one response is {MAX_RESULT_BYTES}."
            raise InvalidRequest(message, param=self.param)
        return PooledJob(prompts=[Prompt(each.token_ids) for each in work.inputs], work=work)


def pooled_call(
    endpoint: Endpoint,
    fields: PoolingFields,
    settings: ApiSettings,
    read: Callable[[ServedModel], Awaitable[PooledWork]],
    *,
    num_inputs: int,
    param: str,
) -> PooledCall:
    return PooledCall(
        endpoint=endpoint,
        fields=fields,
        session_id=fields.session_id or fields.user,
        extra_fields=fields.extra_fields,
        num_prompts=min(num_inputs, MAX_RUNNING),  # those that run at the same time
        settings=settings,
        num_inputs=num_inputs,
        param=param,
        read=read,
    )


@dataclass(frozen=True, kw_only=True)
class PooledJob(Job):
    work: PooledWork

    def check(self, model: ServedModel) -> None:
        """All inputs were checked when they were read."""

    async def run(self, running: Running, writer: ResponseWriter) -> None:
        accepted, model = running.accepted, running.prepared.model
        divided = [divide(each, model.info) for each in self.work.inputs]
        parts = [part for each in divided for part in each]
        values = await combine(divided, await compute(parts, running))
        envelope = PooledEnvelope(accepted.id, int(accepted.created), model.name, running.usage)
        await writer.send(await self.work.render(values, envelope))


async def compute(inputs: Sequence[PooledInput], running: Running) -> list[PooledOutput]:
    """Return the outputs in the order of their inputs. A job may call it again when they are there. Raises the error of
    the first that failed."""
    generation, hints = running.generation, running.prepared.hints[0]
    outputs: list[PooledOutput] = []
    while True:
        room = MAX_RUNNING - generation.num_running
        for each in inputs[len(outputs) : len(outputs) + min(room, SENT_IN_A_TURN)]:
            prompt, index = Prompt(each.token_ids, images=each.images), len(running.sequences)
            request = running.engine_request(index, prompt, sampling_params=_NO_SAMPLING, pooling_params=each.params)
            outputs.append(PooledOutput(generation))
            running.sequences.append(outputs[-1])
            generation.add(outputs[-1], request, hints)
        generation.start()
        if len(outputs) < len(inputs) and room > SENT_IN_A_TURN:
            await asyncio.sleep(0)
        elif generation.finished:
            return outputs
        else:
            await generation.wait()


def _num_values(each: PooledInput, model: ServedModel) -> int:
    params, info = each.params, model.info
    match params.task:
        case PoolingTask.CLASSIFY | PoolingTask.TOKEN_CLASSIFY:
            size = max(1, len(info.labels))
        case PoolingTask.TOKEN_LOGPROBS:
            size = len(params.score_token_ids)
        case _:
            size = params.dimensions or info.embedding_size
    return size * (len(each.token_ids) if params.task.is_by_token else 1)
