"""Transcription: the text of an audio file, whose windows engines read side by side.

Windows do not depend on each other: a model that reads the text of the window before repeats itself over an hour.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Final

from proa.contract import Audio, SamplingParams, TokenLogprobs, hash_audio
from proa.text import TextStream
from proa_gateway.apis.audio.render import WITHOUT_SPACES, JoinedText, TranscriptUsage
from proa_gateway.apis.audio.whisper import WhisperRequest
from proa_gateway.audio.loader import AudioFile, AudioLoader, WindowOutcome
from proa_gateway.audio.memory import HeldSamples
from proa_gateway.audio.processes import Window
from proa_gateway.engines.generation import Generation
from proa_gateway.errors import GatewayError
from proa_gateway.output.text import Delta, EngineSequence, OutputProcessor
from proa_gateway.serving.choices import Prompt
from proa_gateway.serving.job import Running

UNFINISHED_WINDOWS: Final = 8
"""Windows of one audio that are decoded and whose text is not complete: 16 MB of samples of 30 s each."""


class WindowText:
    """The text of one window, as a `DeltaSink`. `on_change` is called when there is more of it."""

    is_satisfied = False
    reasoning_tokens = None

    def __init__(self, on_change: Callable[[], None]) -> None:
        self._on_change = on_change
        self._texts: list[str] = []  # not taken yet
        self._logprobs: list[TokenLogprobs] = []  # of these
        self.has_ended = False

    def text(self, text: str) -> None:
        self._texts.append(text)
        self._on_change()

    def delta(self, delta: Delta) -> None:
        self._logprobs += delta.logprobs
        self.text(delta.text)

    def marker(self, token_id: int) -> None:
        """A timestamp, which is no text."""

    def end(self) -> None:
        self.has_ended = True
        self._on_change()

    def take(self) -> tuple[str, list[TokenLogprobs]]:
        """What has come since the last call."""
        text, logprobs = "".join(self._texts), self._logprobs
        self._texts, self._logprobs = [], []
        return text, logprobs


class _Ending:
    """The `SequenceListener` of one sequence, whose end can be awaited."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self.ended_once = asyncio.Event()

    def started(self, sequence: EngineSequence) -> None:
        self._generation.started(sequence)

    def ended(self, sequence: EngineSequence) -> None:
        self._generation.ended(sequence)
        self.ended_once.set()

    def draining(self, sequence: EngineSequence) -> None:
        self._generation.draining(sequence)

    def failed(self, sequence: EngineSequence, error: GatewayError, *, retryable: bool) -> None:
        self._generation.failed(sequence, error, retryable=retryable)


class Transcription:
    """`text`: of the windows so far, as far as it was taken."""

    def __init__(
        self,
        file: AudioFile,
        loader: AudioLoader,
        whisper: WhisperRequest,
        params: SamplingParams,
        running: Running,
        usage: TranscriptUsage,
    ) -> None:
        """`params`: of the requests for windows."""
        self._file = file
        self._loader = loader
        self._whisper = whisper
        self._params = params
        self._running = running
        self._windows: list[WindowText] = []  # in order, without those that were taken completely
        self._slots = asyncio.Semaphore(UNFINISHED_WINDOWS)
        self._changed = asyncio.Event()
        self._num_requests = 0
        self._error: Exception | None = None
        self.usage = usage
        self.text = JoinedText()
        self.has_ended = False

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Transcribe, at most as long as the context."""
        task = asyncio.create_task(self._run())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def more(self) -> None:
        """Wait until `take` may return something, or the transcription has ended. Raises `GatewayError`."""
        await self._changed.wait()
        if self._error is not None:
            raise self._error
        self._changed.clear()

    def take(self) -> tuple[str, list[TokenLogprobs]]:
        """What the text has more since the last call."""
        texts, logprobs = list[str](), list[TokenLogprobs]()
        for window in self._readable():
            text, entries = window.take()
            texts.append(self.text.add(text))
            logprobs += entries
            if window.has_ended:
                self.text.end_window()
        return "".join(texts), logprobs

    def _readable(self) -> Iterator[WindowText]:
        """Yield the windows whose text is next: those that have ended, which are removed, and the first other one."""
        while self._windows:
            window = self._windows[0]
            yield window
            if not window.has_ended:
                return
            self._windows.pop(0)

    async def _run(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                watching = group.create_task(self._watch())
                with self._loader.memory.request() as held:
                    async with asyncio.TaskGroup() as windows:
                        await self._decode(windows, held)
                watching.cancel()
            self.has_ended = True
        except ExceptionGroup as errors:
            self._error = _first(errors)
        self._changed.set()

    async def _watch(self) -> None:
        """Raise the error of the first request that fails, or that takes too long."""
        while True:
            await self._running.generation.wait()

    async def _decode(self, windows: asyncio.TaskGroup, held: HeldSamples) -> None:
        """Start a task for each of the file's windows."""
        with self._running.accepted.trace.span("audio") as span:
            async with self._loader.windows(self._file, held) as decoded:
                await self._slots.acquire()
                async for window in decoded:
                    self.usage.seconds = decoded.seconds
                    text = WindowText(self._changed.set)
                    self._windows.append(text)
                    if window.samples:
                        windows.create_task(self._transcribe(await self._audio(window), text, held))
                    else:
                        self._end(text, "silent")
                    await self._slots.acquire()
                span.set_attribute("proa.audio.seconds", decoded.seconds)

    async def _audio(self, window: Window) -> Audio:
        hash = await asyncio.to_thread(hash_audio, window.samples)
        audio = Audio(hash=hash, num_samples=window.num_samples, samples=window.samples)
        if not self._whisper.language:
            await self._find_language(audio)
        if self._whisper.language in WITHOUT_SPACES:
            self.text.separator = ""
        return audio

    async def _find_language(self, audio: Audio) -> None:
        prompt = Prompt(self._whisper.language_prompt(), audios=(audio,))
        ending = _Ending(self._running.generation)
        sequence = OutputProcessor(None, WindowText(self._changed.set), ending, wants_tokens=False)
        await self._send(sequence, ending, prompt, self._whisper.language_params())
        self._whisper = self._whisper.in_language(sequence.received[0])

    async def _transcribe(self, audio: Audio, text: WindowText, held: HeldSamples) -> None:
        await self._generate(audio, text)
        held.release(len(audio.samples))
        self._end(text, "accepted")

    def _end(self, text: WindowText, outcome: WindowOutcome) -> None:
        self._loader.metrics.observe_window(outcome)
        text.end()
        self._slots.release()

    async def _generate(self, audio: Audio, text: WindowText) -> None:
        model = self._running.prepared.model
        prompt = Prompt(self._whisper.prompt(), audios=(audio,))
        assert model.info.audios is not None
        self.usage.text_tokens += len(prompt.token_ids)
        self.usage.audio_tokens += model.info.audios.num_tokens(audio.num_samples)
        ending = _Ending(self._running.generation)
        sequence = OutputProcessor(
            TextStream(model.tokenizer.vocabulary),
            text,
            ending,
            wants_tokens=self._params.logprobs is not None,
            markers=self._whisper.timestamps(model.info.vocab_size),
        )
        self._running.sequences.append(sequence)
        await self._send(sequence, ending, prompt, self._params)
        self.usage.output_tokens += sequence.num_tokens

    async def _send(self, sequence: OutputProcessor, ending: _Ending, prompt: Prompt, params: SamplingParams) -> None:
        """Send a request, and wait for the end of its output."""
        generation, hints = self._running.generation, self._running.prepared.hints[0]
        request = self._running.engine_request(self._num_requests, prompt, sampling_params=params)
        self._num_requests += 1
        generation.add(sequence, request, hints)
        generation.start()
        await ending.ended_once.wait()


def _first(errors: ExceptionGroup[Exception]) -> Exception:
    first = errors.exceptions[0]
    return _first(first) if isinstance(first, ExceptionGroup) else first
