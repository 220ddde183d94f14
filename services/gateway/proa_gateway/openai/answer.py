"""The answer to one generation request: as a stream of events, or whole.

Sequences and their consumers are set up here and waited for; tokens pass by without coming here.
"""

from collections.abc import Sequence

from starlette.types import Send

from proa.text import TextStream
from proa_gateway.config import GatewayConfig
from proa_gateway.engines.generation import Generation
from proa_gateway.engines.model_registry import ServedModel
from proa_gateway.errors import GatewayError
from proa_gateway.openai.consumers import ChoiceStream, Collector
from proa_gateway.openai.rendering import DONE, Prompt, error_event
from proa_gateway.openai.request_context import RequestContext
from proa_gateway.openai.sse import EventWriter
from proa_gateway.output_processor import Consumer
from proa_gateway.types import EngineRequest, SamplingParams


class Answer:
    """Call `stream` or `complete`, once. `params`: one for each choice of a prompt."""

    def __init__(
        self,
        context: RequestContext,
        generation: Generation,
        model: ServedModel,
        params: Sequence[SamplingParams],
        config: GatewayConfig,
    ) -> None:
        self._context = context
        self._generation = generation
        self._model = model
        self._params = params
        self._config = config

    async def stream(self, send: Send, send_event: Send) -> None:
        """Raises `GatewayError` where the first token never came; later errors are events. Nothing is sent before
        the first token, so that errors until then have a status."""
        context, generation, handler = self._context, self._generation, self._context.handler
        options = handler.request.stream_options
        continuous = options is not None and options.continuous_usage_stats
        envelope = context.envelope()
        events = EventWriter(send, send_event, generation.wake, patience=self._config.deadlines.slow_reader)
        streams: list[ChoiceStream] = []
        openings: list[bytes] = []
        for index, prompt in enumerate(self._prompts()):
            choice = handler.choice(envelope, index, prompt, self._model)
            stream = ChoiceStream(
                choice,
                events,
                interval=self._config.stream_interval,
                wake=generation.wake,
                usage=(lambda: context.usage) if continuous else None,
            )
            self._add(index, prompt, stream)
            streams.append(stream)
            openings.append(choice.opening())
        generation.start()
        await generation.wait()
        await events.start()
        if opening := b"".join(openings):
            events.write(opening)
        last = DONE
        try:
            await self._pass_on(events, streams)
            if options is not None and options.include_usage:
                last = envelope.usage_event(context.usage) + DONE
        except GatewayError as error:
            context.error = error
            await self._flush(events, streams)
            last = error_event(error.to_dict()) + DONE
        await events.end(last)

    async def complete(self, send: Send) -> None:
        """Raises `GatewayError`."""
        context, generation, handler = self._context, self._generation, self._context.handler
        envelope = context.envelope()
        prompts = self._prompts()
        collectors = [Collector() for _ in prompts]
        for index, prompt in enumerate(prompts):
            self._add(index, prompt, collectors[index])
        generation.start()
        while not generation.finished:
            await generation.wait()
        results = [collector.result() for collector in collectors]
        choices = [
            handler.choice(envelope, index, prompts[index], self._model).final(result)
            for index, result in enumerate(results)
        ]
        extras = handler.extras(choices, context.prompts, results, self._model)
        body = envelope.response(choices, context.usage, **extras)
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def _prompts(self) -> list[Prompt]:
        """One for each choice of the answer."""
        return [prompt for prompt in self._context.prompts for _ in self._params]

    def _add(self, index: int, prompt: Prompt, consumer: Consumer) -> None:
        handler = self._context.handler
        request = handler.request
        engine_request = EngineRequest(
            request_id=f"{self._context.id}-{index}",
            prompt_token_ids=prompt.token_ids,
            sampling_params=self._params[index % len(self._params)],
            priority=self._context.priority,
            cache_salt=request.cache_salt or "",
            arrival_time=self._context.created,
        )
        hints = self._context.routing_hints[index // len(self._params)]
        text = self._text(prompt)
        self._generation.add(engine_request, hints, text, consumer, wants_tokens=handler.wants_tokens())

    def _text(self, prompt: Prompt) -> TextStream | None:
        """None: no output is wanted, only the prompt."""
        handler = self._context.handler
        request = handler.request
        if request.max_tokens == 0:
            return None
        return TextStream(
            self._model.tokenizer.vocabulary,
            stop=request.stop or (),
            include_stop_str_in_output=request.include_stop_str_in_output or False,
            skip_special_tokens=request.skip_special_tokens is not False,
            min_tokens=request.min_tokens or 0,
            context=handler.context(prompt),
        )

    async def _pass_on(self, events: EventWriter, streams: Sequence[ChoiceStream]) -> None:
        """Until every sequence has ended and all of it is written. Only a slow client brings work here."""
        while True:
            await self._flush(events, streams)
            if self._generation.finished:
                return
            await self._generation.wait()

    async def _flush(self, events: EventWriter, streams: Sequence[ChoiceStream]) -> None:
        """Writes what is pending, as fast as the client takes it. Raises `TimeoutError`."""
        while True:
            await events.drain()
            for stream in streams:
                stream.flush()
            if not events.blocked:
                return
