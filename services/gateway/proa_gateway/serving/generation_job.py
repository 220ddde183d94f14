"""Generation: requests whose outputs are text. Each choice of each prompt is one request to an engine.

Tokens do not pass through the coroutines here: each sequence's `Choice` writes or collects them. The coroutines only
wait for the first token, for a slow client and for the end.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, replace

from opentelemetry.util.types import AttributeValue

from proa.contract import EventType, SamplingParams
from proa.text import TextStream
from proa_gateway.engines.models import ServedModel
from proa_gateway.errors import GatewayError, InvalidRequest
from proa_gateway.http.streaming import ResponseWriter
from proa_gateway.output.digit_runs import ConstrainedOutput
from proa_gateway.output.text import OutputProcessor, SequenceListener
from proa_gateway.serving.choices import Choice, ChoiceCollector, ChoiceStream, Prompt, Renderer, Usage
from proa_gateway.serving.generation_request import GenerationRequest
from proa_gateway.serving.job import Accepted, ApiCall, ApiSettings, Job, Running
from proa_gateway.serving.prompt import check_context

MakeRenderer = Callable[[str, int], Renderer]
"""Makes a response's renderer from its id and the time of its creation, in Unix seconds."""


# In a response, where each takes about 70 bytes of JSON, and as much while the response is put together. A prompt of
# 131,072 tokens with 5 alternatives to each has fewer.
MAX_PROMPT_LOGPROBS = 1_000_000


@dataclass(frozen=True, kw_only=True)
class GenerationCall(ApiCall):
    fields: GenerationRequest  # whatever the API calls them
    settings: ApiSettings

    @property
    def num_choices(self) -> int:
        return self.fields.n or 1

    @property
    def is_streamed(self) -> bool:
        return bool(self.fields.stream)

    def check(self) -> None:
        request, limit = self.fields, self.settings.max_choices
        if self.num_prompts * self.num_choices > limit:
            raise InvalidRequest(f"n times the number of prompts must not be above {limit}.", param="n")
        if request.stream_options and request.stream_options.changes_stream and not request.stream:
            raise InvalidRequest("stream_options needs stream to be true.", param="stream_options")
        if request.stream and request.prompt_logprobs is not None:
            raise InvalidRequest("prompt_logprobs cannot be streamed.", param="prompt_logprobs")
        request.check()
        _ = request.constraint  # raises if there are several


@dataclass(frozen=True, kw_only=True)
class GenerationJob(Job):
    """Generates a text for each choice of each prompt."""

    request: GenerationRequest
    param: str  # the body's field that has the prompt, for errors
    params: Sequence[SamplingParams]  # one for each choice of a prompt
    text_stream: Callable[[Prompt], TextStream | None]
    """Turns the output of a prompt into text. None: the output is discarded, only the prompt is scored."""
    renderer: MakeRenderer
    continuous_usage: bool = False  # every event of a stream has the usage

    @property
    def max_tokens(self) -> int | None:
        return self.params[0].max_tokens

    @property
    def uses_prefix_cache(self) -> bool:
        return self.params[0].prompt_logprobs is None  # these need every prompt token computed

    @property
    def parameters(self) -> Mapping[str, AttributeValue | None]:
        request, params = self.request, self.params[0]
        return {
            "stream": bool(request.stream),
            "choice.count": request.n if request.n != 1 else None,
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k or None,
            "seed": request.seed,
            "frequency_penalty": request.frequency_penalty,
            "presence_penalty": request.presence_penalty,
            "stop_sequences": request.stop or None,
        }

    def check(self, model: ServedModel) -> None:
        for prompt in self.prompts:
            if not prompt.token_ids:
                raise InvalidRequest("The prompt has no tokens.", param=self.param)
            check_context(len(prompt.token_ids), model, self.param)
        count = self.params[0].prompt_logprobs
        num_tokens = len(self.params) * sum(len(prompt.token_ids) for prompt in self.prompts)
        if count is not None and num_tokens * (1 + count) > MAX_PROMPT_LOGPROBS:
            raise InvalidRequest(
                f"The log probabilities of {num_tokens:,} prompt tokens and {count:,} alternatives to each are more "
                f"than {MAX_PROMPT_LOGPROBS:,}; send fewer prompts in one request, or ask for fewer alternatives.",
                param=self.param,
            )

    async def run(self, running: Running, writer: ResponseWriter) -> None:
        accepted, generation = running.accepted, running.generation
        renderer = self.renderer(accepted.id, int(accepted.created))
        prompts = [prompt for prompt in self.prompts for _ in self.params]  # one for each choice
        if self.request.stream:
            streams = [
                ChoiceStream(
                    prompt.message_format,
                    renderer.choice(index, prompt),
                    writer,
                    interval=max(running.config.stream_interval, self.request.stream_interval or 1),
                    on_blocked=generation.wake,
                    usage=(lambda: running.usage) if self.continuous_usage else None,
                )
                for index, prompt in enumerate(prompts)
            ]
            self._start(streams, renderer, running)
            await _stream(streams, renderer, running, writer)
            return
        collectors = collectors_of(prompts, renderer)
        self._start(collectors, renderer, running)
        while not generation.finished:
            await generation.wait()
        await writer.send_json(renderer.body([choice.output() for choice in collectors], final_usage(running)))

    def error_events(self, accepted: Accepted, error: GatewayError) -> bytes:
        return self.renderer(accepted.id, int(accepted.created)).error_events(error)

    def processor(
        self, prompt: Prompt, choice: Choice, listener: SequenceListener, *, wants_tokens: bool, running: Running
    ) -> OutputProcessor:
        """Return the sequence whose output the choice gets. `wants_tokens`: as for `OutputProcessor`."""
        markers = prompt.message_format.markers if prompt.message_format is not None else None
        stream, sink, prepared = self.text_stream(prompt), choice.consumer or choice, running.prepared
        if prepared.grammar is None or self.request.repetition_detection is not None:
            return OutputProcessor(stream, sink, listener, wants_tokens=wants_tokens, markers=markers)
        return ConstrainedOutput(
            stream,
            sink,
            listener,
            wants_tokens=wants_tokens,
            markers=markers,
            vocabulary=prepared.model.tokenizer.vocabulary,
            warn=running.warn,
        )

    def _start(self, choices: Sequence[Choice], renderer: Renderer, running: Running) -> None:
        """Send one engine request for each choice, which gets its output."""
        generation, prepared = running.generation, running.prepared
        for index, choice in enumerate(choices):
            prompt_index, choice_index = divmod(index, len(self.params))
            prompt, params = self.prompts[prompt_index], self.params[choice_index]
            if prepared.grammar is not None:
                params = copy(params)  # `replace` would check long lists of token ids again
                params.grammar = prepared.grammar
            sequence = self.processor(prompt, choice, generation, wants_tokens=renderer.wants_tokens, running=running)
            running.sequences.append(sequence)
            request = running.engine_request(index, prompt, sampling_params=params)
            generation.add(sequence, request, prepared.hints[prompt_index])
        generation.start()


def collectors_of(prompts: Sequence[Prompt], renderer: Renderer) -> list[ChoiceCollector]:
    """A choice for each of the prompts, for a response that is not streamed."""
    return [
        ChoiceCollector(prompt, renderer.choice(index, prompt) if renderer.follows_output else None)
        for index, prompt in enumerate(prompts)
    ]


async def _stream(
    choices: Sequence[ChoiceStream], renderer: Renderer, running: Running, writer: ResponseWriter
) -> None:
    """Write events until the end. Raises `GatewayError` before the first token, when the status can mostly still be an
    error's; later errors are events. The status does not wait for the first token for longer than
    `sse_keep_alive_interval`: clients give up if none comes, Qwen Code after two minutes."""
    generation, keep_alive, is_late = running.generation, running.config.sse_keep_alive_interval, False
    try:
        async with asyncio.timeout(keep_alive or None):
            await generation.wait()
    except TimeoutError:
        is_late = True
    await writer.start_comments(keep_alive)
    if is_late:
        with suppress(GatewayError):  # the next `wait` raises it again
            await generation.wait()
    await writer.drain()
    usage = replace(running.usage, completion_tokens=0)
    if opening := b"".join(choice.renderer.opening(usage) for choice in choices):
        writer.write(opening)
    try:
        await _flush(writer, choices)
        while not generation.finished:
            await generation.wait()
            await _flush(writer, choices)
        last = renderer.last_events(final_usage(running))
    except GatewayError as error:
        await _flush(writer, choices)
        last = renderer.error_events(error)
    await writer.end(last)


async def _flush(writer: ResponseWriter, choices: Sequence[ChoiceStream]) -> None:
    """Write what is pending, as fast as the client reads."""
    while True:
        await writer.drain()
        for choice in choices:
            choice.flush()
        if not writer.blocked:
            return


def final_usage(running: Running) -> Usage:
    """Return the usage, with the request's times if `--enable-per-request-metrics` asks for them and there is one
    sequence."""
    usage, sequences = running.usage, running.sequences
    if not running.config.enable_per_request_metrics or len(sequences) > 1:
        return usage
    return replace(usage, metrics=request_times(sequences[0].times, sequences[0].num_tokens))


def request_times(times: Mapping[EventType, float], num_tokens: int) -> dict[str, float | None]:
    """vLLM's times of a request: milliseconds, and tokens a second. `times`: of the engine's events, in seconds. None:
    an event did not come; an engine sends none for the end of an output that the gateway ends, such as at a stop
    string.

    The queue is the engine's. The first token counts from the first step, so both together are the engine's time to it.
    `tokens_per_second` counts from there too.
    """
    generation = _between(times, EventType.FIRST_TOKEN, EventType.FINISHED)
    inference = _between(times, EventType.SCHEDULED, EventType.FINISHED)
    metrics = {
        "time_to_first_token_ms": _between(times, EventType.SCHEDULED, EventType.FIRST_TOKEN),
        "generation_time_ms": generation,
        "queue_time_ms": _between(times, EventType.QUEUED, EventType.SCHEDULED),
        "tokens_per_second": num_tokens / inference * 1000 if inference else None,
    }
    if generation is not None and num_tokens > 1:
        metrics["mean_itl_ms"] = generation / (num_tokens - 1)
    return metrics


def _between(times: Mapping[EventType, float], start: EventType, end: EventType) -> float | None:
    """Milliseconds. After a failover the events are of different clocks."""
    return max(0.0, times[end] - times[start]) * 1000 if start in times and end in times else None
