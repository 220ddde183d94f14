"""Responder: generates the choices of one request and writes them, as a stream of events or as one body."""

import secrets
from collections.abc import Sequence
from dataclasses import replace

from proa.contract import EngineCoreRequest, SamplingParams
from proa_gateway.config import GatewayConfig
from proa_gateway.engines.generation import Generation
from proa_gateway.engines.model_registry import ServedModel
from proa_gateway.errors import GatewayError
from proa_gateway.http.streaming import ResponseWriter
from proa_gateway.serving.answer import ChoiceOutput, EventOutlet, StreamedChoice
from proa_gateway.serving.envelope import Usage
from proa_gateway.serving.request_times import request_times
from proa_gateway.serving.served_request import RequestContext


class Responder:
    """Call `stream` or `complete`, once.

    Tokens do not pass through here: each sequence's sink writes or collects them. The coroutines only wait for the
    first token, for a slow client and for the end.
    """

    def __init__(
        self,
        context: RequestContext,
        generation: Generation,
        model: ServedModel,
        params: Sequence[SamplingParams],
        config: GatewayConfig,
    ) -> None:
        """`params`: one for each choice of a prompt."""
        self._context = context
        self._handler = context.handler
        self._generation = generation
        self._model = model
        self._params = params
        self._config = config
        self._prompts = [prompt for prompt in context.prompts for _ in params]  # one for each choice
        self._answer = self._handler.answer(context.id, int(context.created), model, context.prompts)

    async def stream(self, writer: ResponseWriter) -> None:
        """Stream events. Raises `GatewayError` before the first token, while the status can still be an error's; later
        errors are events."""
        context, generation = self._context, self._generation
        request = context.request
        outlet = EventOutlet(
            writer,
            interval=max(self._config.stream_interval, request.stream_interval or 1),
            on_pending=generation.wake,
            usage=(lambda: context.usage) if request.continuous_usage else None,
        )
        streams = [self._answer.stream(index, prompt, outlet) for index, prompt in enumerate(self._prompts)]
        self._start(streams)
        await generation.wait()
        await writer.start_events(write_timeout=self._config.deadlines.slow_reader)
        usage = replace(context.usage, completion_tokens=0)
        if opening := b"".join(stream.opening(usage) for stream in streams):
            writer.write(opening)
        try:
            await self._write_all(writer, streams)
            last = self._answer.last_events(self._final_usage())
        except GatewayError as error:
            context.error = error
            await self._flush(writer, streams)
            last = self._answer.error_events(error)
        await writer.end(last)

    async def complete(self, writer: ResponseWriter) -> None:
        """Write one body, once all sequences have ended. Raises `GatewayError`."""
        generation = self._generation
        choices = [self._answer.collect(index, prompt) for index, prompt in enumerate(self._prompts)]
        self._start(choices)
        while not generation.finished:
            await generation.wait()
        await writer.send_json(self._answer.body(choices, self._final_usage()))

    def _final_usage(self) -> Usage:
        """With the request's times if they are wanted; several sequences have different ones."""
        usage, sequences = self._context.usage, self._context.sequences
        if not self._config.enable_per_request_metrics or len(sequences) > 1:
            return usage
        return replace(usage, metrics=request_times(sequences[0].times, sequences[0].num_tokens))

    def _start(self, choices: Sequence[ChoiceOutput]) -> None:
        """Send one engine request for each choice; its output goes to the choice's sink."""
        context, handler, lora = self._context, self._handler, self._model.lora
        context.choices = choices
        suffix = secrets.token_hex(4)  # clients choose ids, and engines refuse one that is in use
        for index, (prompt, choice) in enumerate(zip(self._prompts, choices, strict=True)):
            prompt_index, choice_index = divmod(index, len(self._params))
            engine_request = EngineCoreRequest(
                request_id=f"{context.id}-{suffix}-{index}",
                prompt_token_ids=prompt.token_ids,
                sampling_params=self._params[choice_index],
                priority=context.priority,
                cache_salt=context.caller.cache_salt(context.request.cache_salt),
                arrival_time=context.created,
                lora_name=lora.name if lora is not None else "",
                lora_digest=lora.digest if lora is not None else "",
                images=prompt.images,
            )
            self._generation.add(
                engine_request,
                context.routing_hints[prompt_index],
                handler.text_stream(prompt, self._model),
                choice.sink,
                wants_tokens=self._answer.wants_tokens,
                markers=choice.markers,
            )
        self._generation.start()

    async def _write_all(self, writer: ResponseWriter, streams: Sequence[StreamedChoice]) -> None:
        """Return when every sequence has ended and its last event is written. Only a slow client causes work here."""
        while True:
            await self._flush(writer, streams)
            if self._generation.finished:
                return
            await self._generation.wait()

    async def _flush(self, writer: ResponseWriter, streams: Sequence[StreamedChoice]) -> None:
        """Write what is pending, as fast as the client reads. Raises `TimeoutError`."""
        while True:
            await writer.drain()
            for stream in streams:
                stream.flush()
            if not writer.blocked:
                return
