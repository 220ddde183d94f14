"""What engines get for transcriptions and translations, and how their text is written."""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from opentelemetry.util.types import AttributeValue

from proa.contract import (
    AudioInput,
    PoolingTask,
    RepetitionDetectionParams,
    SamplingParams,
    TimestampRules,
    TokenLogprobs,
)
from proa_gateway.apis.audio.asr import AsrRequest, asr_request
from proa_gateway.apis.audio.protocol import REFUSED_IN_AUDIO, TranscriptionRequest
from proa_gateway.apis.audio.render import TranscriptRenderer, TranscriptUsage, plain_text, srt, verbose_json, vtt
from proa_gateway.apis.audio.transcription import Transcription
from proa_gateway.apis.audio.whisper import ENGLISH, Task, WhisperRequest, whisper_request
from proa_gateway.audio.loader import AudioFile, AudioLoader
from proa_gateway.engines.models import ServedModel
from proa_gateway.errors import GatewayError, InvalidRequest, MissingField, UnsupportedTask
from proa_gateway.http.streaming import Content, ResponseWriter
from proa_gateway.serving.content import ContentFormat
from proa_gateway.serving.generation_request import GenerationRequest, sampling_params
from proa_gateway.serving.job import Accepted, ApiCall, Endpoint, Job, Running
from proa_gateway.serving.prompt import check_context

FILE = "file"
TRANSCRIPTIONS = Endpoint("/v1/audio/transcriptions", "transcription", "trsc-", REFUSED_IN_AUDIO, transcribes=True)
TRANSLATIONS = Endpoint("/v1/audio/translations", "translation", "trsl-", REFUSED_IN_AUDIO, transcribes=True)
REPETITION = RepetitionDetectionParams(max_pattern_size=16, min_count=12)
"""Ends an attempt that would go on repeating itself up to the model's longest output."""
_SAMPLING = ("seed", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")


@dataclass(frozen=True, kw_only=True)
class TranscriptionCall(ApiCall):
    fields: TranscriptionRequest
    task: Task
    file: list[bytearray]  # its content, in parts
    loader: AudioLoader
    content_format: ContentFormat  # of what chat templates read

    @property
    def is_streamed(self) -> bool:
        return bool(self.fields.stream)

    def check(self) -> None:
        request = self.fields
        if not self.file:
            raise MissingField(f"{FILE}: Field required, with the content of an audio file", param=FILE)
        if request.stream and request.response_format not in (None, "json"):
            raise InvalidRequest(f"{request.response_format} cannot be streamed.", param="response_format")
        if request.wants_logprobs and request.response_format not in (None, "json"):
            raise InvalidRequest("include needs the response_format json.", param="include")
        if request.timestamp_granularities and request.response_format != "verbose_json":
            message = "timestamp_granularities needs the response_format verbose_json."
            raise InvalidRequest(message, param="timestamp_granularities")

    async def prepare(self, model: ServedModel) -> "TranscriptionJob":
        audios, fields = model.info.audios, self.fields
        assert audios is not None  # `Serving` has checked it, as `transcribes` demands
        rate, rules = audios.sampling_rate, None
        request = await self._request(model, audios)
        if fields.has_timestamps:
            if isinstance(request, AsrRequest):
                raise UnsupportedTask(f"The model {model.name!r} writes no timestamps.", param="response_format")
            request, rules = request.with_timestamps(model)
        if fields.wants_words and PoolingTask.ALIGN not in model.info.pooling_tasks:
            message = f"The model {model.name!r} names no alignment heads, which times of words need."
            raise UnsupportedTask(message, param="timestamp_granularities")
        return TranscriptionJob(
            prompts=[request.first_prompt()],
            fields=fields,
            file=AudioFile(
                data=self.file,
                param=FILE,
                sampling_rate=rate,
                max_window=request.max_window,
                max_samples=self.loader.options.max_audio_seconds * rate,
            ),
            loader=self.loader,
            request=request,
            attempts=_attempts(fields, model, request, rules),
        )

    async def _request(self, model: ServedModel, audios: AudioInput) -> WhisperRequest | AsrRequest:
        language, text = self.fields.language, self.fields.prompt or ""
        if audios.whisper is not None:
            return await whisper_request(model, audios.whisper, self.task, language, text, audios.max_samples)
        if audios.asr is None:
            raise UnsupportedTask(f"The model {model.name!r} transcribes in chats only.", param="model")
        if self.task == "translate":
            raise UnsupportedTask(f"The model {model.name!r} does not translate.", param="model")
        return await asr_request(model, audios, audios.asr, language, text, self.content_format)


@dataclass(frozen=True, kw_only=True)
class TranscriptionJob(Job):
    """`prompts`: one without its audio, whose windows are not known before they are decoded."""

    fields: TranscriptionRequest
    file: AudioFile
    loader: AudioLoader
    request: WhisperRequest | AsrRequest
    attempts: Sequence[SamplingParams]  # for each window
    usage: TranscriptUsage = field(default_factory=TranscriptUsage)  # so far

    @property
    def num_tokens(self) -> int:
        return self.usage.input_tokens or len(self.prompts[0].token_ids)

    @property
    def max_tokens(self) -> int | None:
        return self.attempts[0].max_tokens

    @property
    def parameters(self) -> Mapping[str, AttributeValue | None]:
        params = self.attempts[0]
        return {
            "stream": bool(self.fields.stream),
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k or None,
            "seed": self.fields.seed,
        }

    def check(self, model: ServedModel) -> None:
        check_context(self.request.num_prompt_tokens, model, "prompt")

    def error_events(self, accepted: Accepted, error: GatewayError) -> bytes:
        return TranscriptRenderer.error_events(error)

    async def run(self, running: Running, writer: ResponseWriter) -> None:
        model = running.prepared.model
        transcription = Transcription(
            self.file,
            self.loader,
            self.request,
            self.attempts,
            running,
            self.usage,
            wants_words=self.fields.wants_words,
        )
        renderer = TranscriptRenderer(model.tokenizer.vocabulary, self.fields.wants_logprobs)
        if self.fields.stream:
            await _stream(transcription, renderer, writer, running.config.sse_keep_alive_interval)
            return
        async with transcription.running():
            while not transcription.has_ended:
                await transcription.more()
        _, logprobs = transcription.take()
        await writer.send(self._content(transcription, renderer, logprobs))

    def _content(
        self, transcription: Transcription, renderer: TranscriptRenderer, logprobs: Sequence[TokenLogprobs]
    ) -> Content:
        text = str(transcription.text)
        times = self.request.times
        if times is None:
            is_text = self.fields.response_format == "text"
            return plain_text(text) if is_text else renderer.json(text, logprobs, self.usage)
        segments = [each for window in transcription.windows for each in window.segments(times)]
        match self.fields.response_format:
            case "srt":
                return srt(segments)
            case "vtt":
                return vtt(segments)
        language = ENGLISH if self.request.task == "translate" else transcription.language
        fields = self.fields
        has_segments = not fields.wants_words or "segment" in fields.timestamp_granularities
        words = [each for window in transcription.windows for each in window.words]
        return verbose_json(
            text,
            self.usage,
            task=self.request.task,
            language=language,
            segments=segments if has_segments else None,
            words=words if fields.wants_words else None,
        )


async def _stream(
    transcription: Transcription, renderer: TranscriptRenderer, writer: ResponseWriter, keep_alive: float
) -> None:
    """Write events until the end. Raises `GatewayError` before the first text, while the status can still be an
    error's; but the status does not wait for it for longer than `keep_alive` seconds."""
    logprobs: list[TokenLogprobs] = []
    async with transcription.running():
        with suppress(TimeoutError):
            async with asyncio.timeout(keep_alive or None):
                await transcription.more()
        await writer.start_comments(keep_alive)
        try:
            while True:
                has_ended = transcription.has_ended
                await writer.drain()
                text, entries = transcription.take()
                logprobs += entries
                if delta := renderer.delta(text, entries):
                    writer.write(delta)
                if has_ended:
                    break
                await transcription.more()
            last = renderer.last_events(str(transcription.text), logprobs, transcription.usage)
        except GatewayError as error:
            last = renderer.error_events(error)
        await writer.end(last)


def _attempts(
    fields: TranscriptionRequest,
    model: ServedModel,
    request: WhisperRequest | AsrRequest,
    rules: TimestampRules | None,
) -> list[SamplingParams]:
    """Of the requests for a window; one if a temperature is given, or what was sent cannot be taken back. Raises
    `InvalidRequest`."""
    temperatures = request.temperatures[:1] if fields.stream else request.temperatures
    if fields.temperature:
        temperatures = (fields.temperature,)
    has_logprobs = fields.wants_logprobs or len(temperatures) > 1 or rules is not None
    given = {name: value for name in _SAMPLING if (value := getattr(fields, name)) is not None}
    attempts = []
    for number, temperature in enumerate(temperatures):
        params = sampling_params(
            GenerationRequest.model_construct(temperature=temperature, n=1 + number, **given),
            model,
            max_tokens=fields.max_completion_tokens,
            logprobs=0 if has_logprobs else None,
            prompt_logprobs=None,
        )[-1]  # whose key is that of the attempt
        params.bad_words_token_ids = tuple((token_id,) for token_id in request.suppressed)
        params.begin_suppress_token_ids = tuple(request.begin_suppressed)
        params.timestamps = rules
        if len(temperatures) > 1:
            params.repetition_detection = REPETITION
        attempts.append(params)
    return attempts
