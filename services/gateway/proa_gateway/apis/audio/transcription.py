"""Transcription: the text of an audio file, whose windows engines read side by side.

Windows do not depend on each other: a model that reads the text of the window before repeats itself over an hour.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Final

from proa.contract import (
    Audio,
    EngineCoreOutput,
    PoolingParams,
    PoolingTask,
    SamplingParams,
    TokenLogprobs,
    hash_audio,
)
from proa.contract.audio import SAMPLE_BYTES
from proa.text import TextStream
from proa_gateway.apis.audio.asr import AsrRequest
from proa_gateway.apis.audio.languages import WITHOUT_SPACES
from proa_gateway.apis.audio.render import JoinedText, TranscriptUsage
from proa_gateway.apis.audio.whisper import WhisperRequest
from proa_gateway.apis.audio.windows import Attempt, WindowText
from proa_gateway.apis.audio.words import Word, timed_words
from proa_gateway.audio.loader import AudioFile, AudioLoader, WindowOutcome
from proa_gateway.audio.memory import HeldSamples
from proa_gateway.engines.generation import Generation
from proa_gateway.errors import GatewayError
from proa_gateway.output.pooled import PooledOutput, PooledValues
from proa_gateway.output.text import EngineSequence, OutputProcessor
from proa_gateway.pooling.values import matrix
from proa_gateway.serving.choices import Prompt
from proa_gateway.serving.job import Running

UNFINISHED_WINDOWS: Final = 8
"""Windows of one audio that are decoded and whose text is not complete: 16 MB of samples of 30 s each."""
# Those of OpenAI's Whisper: a text is tried again at a higher temperature, or there is no speech.
MIN_LOGPROB: Final = -1.0
MAX_NO_SPEECH: Final = 0.6
_NO_SAMPLING: Final = SamplingParams()


class _Ending:
    """The `SequenceListener` of one sequence, whose end can be awaited."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self.has_ended = asyncio.Event()

    def started(self, sequence: EngineSequence) -> None:
        self._generation.started(sequence)

    def ended(self, sequence: EngineSequence) -> None:
        self._generation.ended(sequence)
        self.has_ended.set()

    def draining(self, sequence: EngineSequence) -> None:
        self._generation.draining(sequence)

    def failed(self, sequence: EngineSequence, error: GatewayError, *, retryable: bool) -> None:
        self._generation.failed(sequence, error, retryable=retryable)


class _Probe(OutputProcessor):
    """The sequence that finds a window's language and whether it has speech."""

    __slots__ = ("no_speech_prob",)

    def __init__(self, listener: _Ending) -> None:
        super().__init__(None, WindowText(0, 0, lambda: None), listener, wants_tokens=False)
        self.no_speech_prob = 0.0

    def output(self, output: EngineCoreOutput) -> None:
        for entry in output.logprobs:
            self.no_speech_prob = math.exp(entry.top_logprobs[0]) if entry.top_logprobs else 0.0
        super().output(output)


class Transcription:
    """`text`: of the windows so far, as far as it was taken. `windows`: those whose text was taken completely."""

    def __init__(
        self,
        file: AudioFile,
        loader: AudioLoader,
        request: WhisperRequest | AsrRequest,
        attempts: Sequence[SamplingParams],
        running: Running,
        usage: TranscriptUsage,
        *,
        wants_words: bool,
    ) -> None:
        """`attempts`: parameters of the requests for a window, of which the next one is used if its text is not
        likely. With one attempt only, text can be taken while it comes. `wants_words`: with times."""
        self._file = file
        self._loader = loader
        self._request = request
        self._attempts = attempts
        self._running = running
        self._wants_words = wants_words
        self._unread: list[WindowText] = []  # in order, those that were not taken completely
        self._slots = asyncio.Semaphore(UNFINISHED_WINDOWS)
        self._changed = asyncio.Event()
        self._num_requests = 0
        self._error: Exception | None = None
        self.usage = usage
        self.text = JoinedText()
        self.windows: list[WindowText] = []
        self.has_ended = False

    @property
    def language(self) -> str:
        """Its code; empty if no window had sound to find it in."""
        return self._request.language

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
        while self._unread:
            window = self._unread[0]
            text, entries = window.take()
            self.text.separator = "" if self._request.language_of(window) in WITHOUT_SPACES else " "
            texts.append(self.text.add(text))
            logprobs += entries
            if not window.has_ended:
                break
            self.text.end_window()
            self.windows.append(self._unread.pop(0))
        return "".join(texts), logprobs

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
        file = self._file
        with self._running.accepted.trace.span("audio") as span:
            async with aclosing(self._loader.windows(file, held)) as decoded:
                await self._slots.acquire()
                async for window in decoded:
                    start, duration = self.usage.seconds, window.num_samples / file.sampling_rate
                    self.usage.seconds += duration
                    text = self._request.window(start, duration, self._changed.set)
                    self._unread.append(text)
                    if window.samples:
                        audio = await _audio(window.samples)
                        if self._request.must_find_language:
                            await self._find_language(audio)
                        windows.create_task(self._transcribe(audio, text, held))
                    else:
                        self._end(text, "silent")
                        self._slots.release()
                    if not window.is_last:
                        await self._slots.acquire()
            span.set_attribute("proa.audio.seconds", self.usage.seconds)

    async def _find_language(self, audio: Audio) -> None:
        assert isinstance(self._request, WhisperRequest)
        self._request = self._request.in_language((await self._probe(audio)).received[0])

    async def _transcribe(self, audio: Audio, text: WindowText, held: HeldSamples) -> None:
        """The text of a window; with timestamps maybe of several parts of it, one after the other."""
        rest = audio
        while True:
            await self._read(rest, text)
            if self._wants_words:
                text.words = await self._words(rest, text)
            time = text.unread_from(self._request.times) if self._request.times else None
            if time is None:
                break
            following = text.following(time)
            self._unread.insert(self._unread.index(text) + 1, following)
            self._end(text, "accepted")
            rest, text = await _audio(rest.samples[SAMPLE_BYTES * round(time * self._file.sampling_rate) :]), following
        held.release(len(audio.samples))
        self._end(text, "accepted")
        self._slots.release()

    async def _read(self, audio: Audio, text: WindowText) -> None:
        """With several attempts, try until the text is likely or the audio has no speech. If no text is likely, the
        one with the highest log probability is kept, of those that do not repeat themselves if there are any: the text
        of the highest temperature, which OpenAI's Whisper keeps, is mostly noise."""
        no_speech_prob = (await self._probe(audio)).no_speech_prob if len(self._attempts) > 1 else 0.0
        unlikely: list[Attempt] = []
        for params in self._attempts:
            await self._generate(audio, text, params)
            text.scores = text.score(params.temperature, no_speech_prob)
            is_likely = text.scores.avg_logprob >= MIN_LOGPROB and not text.repeats
            if is_likely or len(self._attempts) == 1:
                return
            unlikely.append(text.clear())
            if no_speech_prob > MAX_NO_SPEECH and unlikely[-1].scores.avg_logprob < MIN_LOGPROB:
                return
            if params is not self._attempts[-1]:
                self._loader.metrics.observe_window("retried")
        text.restore(max(unlikely, key=lambda attempt: (not attempt.repeats, attempt.scores.avg_logprob)))

    async def _words(self, audio: Audio, text: WindowText) -> list[Word]:
        """The words of a window's text, by a request for what its tokens read of the audio."""
        model, whisper = self._running.prepared.model, self._request
        vocabulary, audios = model.tokenizer.vocabulary, model.info.audios
        assert audios is not None
        assert isinstance(whisper, WhisperRequest)
        assert whisper.times is not None, "words come with segments"
        begin_id = whisper.times.begin_id
        said = [each for each in text.token_ids if each < begin_id and not vocabulary.is_skipped(each, True)]
        if not said:
            return []
        prompt = whisper.alignment_prompt(audio, said)
        num_tokens = max(1, audio.num_samples * audios.max_tokens // audios.max_samples)  # that are not padding
        ending = _Ending(self._running.generation)
        output = PooledOutput(ending)
        params = PoolingParams(task=PoolingTask.ALIGN, dimensions=num_tokens)
        await self._send(output, ending, prompt, _NO_SAMPLING, params)
        return await asyncio.to_thread(
            timed_words,
            [vocabulary.token_bytes(each) for each in said],
            matrix(PooledValues(output.values, output.num_rows))[-len(said) - 1 :],
            whisper.times.seconds,
            text.start,
            has_spaces=whisper.language not in WITHOUT_SPACES,
        )

    def _end(self, text: WindowText, outcome: WindowOutcome) -> None:
        self._loader.metrics.observe_window(outcome)
        text.end()

    async def _probe(self, audio: Audio) -> _Probe:
        ending = _Ending(self._running.generation)
        probe = _Probe(ending)
        assert isinstance(self._request, WhisperRequest)
        await self._send(probe, ending, self._request.probe_prompt(audio), self._request.probe_params())
        return probe

    async def _generate(self, audio: Audio, text: WindowText, params: SamplingParams) -> None:
        model = self._running.prepared.model
        prompt = self._request.prompt(audio)
        assert model.info.audios is not None
        self.usage.text_tokens += len(prompt.token_ids) - prompt.audios[0].num_tokens
        self.usage.audio_tokens += model.info.audios.num_tokens(audio.num_samples)
        ending = _Ending(self._running.generation)
        sequence = OutputProcessor(
            TextStream(model.tokenizer.vocabulary),
            text,
            ending,
            wants_tokens=params.logprobs is not None,
            markers=self._request.markers(model.info.vocab_size),
        )
        self._running.sequences.append(sequence)
        await self._send(sequence, ending, prompt, params)
        eos = model.info.eos_token_ids
        text.token_ids = [token_id for token_id in sequence.received if token_id not in eos]
        self.usage.output_tokens += sequence.num_tokens

    async def _send(
        self,
        sequence: EngineSequence,
        ending: _Ending,
        prompt: Prompt,
        params: SamplingParams,
        pooling: PoolingParams | None = None,
    ) -> None:
        """Send a request, and wait for the end of its output."""
        generation, hints = self._running.generation, self._running.prepared.hints[0]
        request = self._running.engine_request(
            self._num_requests, prompt, sampling_params=params, pooling_params=pooling
        )
        self._num_requests += 1
        generation.add(sequence, request, hints)
        generation.start()
        await ending.has_ended.wait()


async def _audio(samples: bytes) -> Audio:
    hash = await asyncio.to_thread(hash_audio, samples)
    return Audio(hash=hash, num_samples=len(samples) // SAMPLE_BYTES, samples=samples)


def _first(errors: ExceptionGroup[Exception]) -> Exception:
    first = errors.exceptions[0]
    return _first(first) if isinstance(first, ExceptionGroup) else first
