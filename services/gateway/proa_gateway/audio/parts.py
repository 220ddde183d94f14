"""AudioPartLoader: the audios of a chat's prompt, from their URLs. Each is one window of samples."""

import asyncio
import hashlib
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final, Protocol

from proa.contract import Audio, AudioInput, hash_audio
from proa.contract.audio import SAMPLE_BYTES
from proa.image.limits import ImageError
from proa_gateway.audio.loader import AudioFile, AudioLoader
from proa_gateway.audio.memory import HeldSamples
from proa_gateway.errors import InvalidRequest, Overloaded
from proa_gateway.images.fetch import is_data_url, read_data_url
from proa_gateway.images.loader import MAX_PROMPT_BYTES, MediaCache
from proa_gateway.observability.telemetry import GatewayTracer

FILE_NAME: Final = "audio file"  # in errors


@dataclass(frozen=True, slots=True)
class AudioSource:
    url: str  # maybe a `data:` URL
    param: str  # where the request has it, for errors


class Fetcher(Protocol):
    async def fetch(self, url: str) -> bytes:
        """Raises `ImageError` and `Overloaded`."""
        ...


class AudioPartLoader:
    def __init__(
        self, loader: AudioLoader, fetcher: Fetcher, max_audios: int, max_cached_bytes: int, tracer: GatewayTracer
    ) -> None:
        """`max_audios`: of a prompt. `max_cached_bytes`: of samples that are kept for the next request with them, as
        each turn of a chat sends those of the turns before."""
        self._loader = loader
        self._fetcher = fetcher
        self._max_audios = max_audios
        self._cache = MediaCache[Audio](max_cached_bytes)
        self._tracer = tracer

    async def load(self, sources: Sequence[AudioSource], input: AudioInput) -> tuple[Audio, ...]:
        """Return the audios in the order of `sources`. Raises `InvalidRequest`, which names the first audio that is not
        used, or `Overloaded`."""
        if len(sources) > self._max_audios:
            param = sources[self._max_audios].param
            raise InvalidRequest(f"At most {self._max_audios} audios may be in one prompt.", param=param)
        audios: list[Audio] = []
        with (
            self._tracer.part("audio", {"proa.num_audios": len(sources)}),
            self._loader.memory.request() as held,
        ):
            for source in sources:
                audios.append(await self._load(source, input, held))
                if sum(len(audio.samples) for audio in audios) > MAX_PROMPT_BYTES:
                    message = f"The audios of a prompt may have {MAX_PROMPT_BYTES} bytes of samples, these have more."
                    raise InvalidRequest(message, param=source.param)
        return tuple(audios)

    async def _load(self, source: AudioSource, input: AudioInput, held: HeldSamples) -> Audio:
        data = await self._read(source)
        key = (await asyncio.to_thread(lambda: hashlib.sha256(data).digest()), input)
        if (audio := self._cache.get(key)) is not None:
            self._loader.metrics.observe_audio("cached", 0.0, 0.0)
            return audio
        samples = await self._decode(data, source.param, input, held)
        num_samples = len(samples) // SAMPLE_BYTES
        if not (num_tokens := input.num_tokens(num_samples)):
            raise InvalidRequest("The audio is too short: the model makes no token of it.", param=source.param)
        hash = await asyncio.to_thread(hash_audio, samples)
        audio = Audio(hash=hash, num_tokens=num_tokens, num_samples=num_samples, samples=samples)
        self._cache.add(key, audio)
        return audio

    async def _read(self, source: AudioSource) -> bytes:
        """The content of the file."""
        try:
            if is_data_url(source.url):
                limit = self._loader.options.max_audio_bytes
                return await asyncio.to_thread(read_data_url, source.url, limit, FILE_NAME)
            return await self._fetcher.fetch(source.url)
        except Overloaded:
            self._loader.metrics.observe_audio("overloaded", 0.0, 0.0)
            raise
        except ImageError as error:
            self._loader.metrics.observe_audio("refused", 0.0, 0.0)
            message = str(error)
            raise InvalidRequest(f"{message[0].upper()}{message[1:]}.", param=source.param) from error

    async def _decode(self, data: bytes, param: str, input: AudioInput, held: HeldSamples) -> bytes:
        """The file's samples, zeros if it is silent. Raises `InvalidRequest` if the model reads fewer."""
        max_samples = input.max_samples
        file = AudioFile(
            data=[bytearray(data)],
            param=param,
            sampling_rate=input.sampling_rate,
            max_window=max_samples,
            max_samples=min(max_samples, self._loader.options.max_audio_seconds * input.sampling_rate),
            num_uncounted=len(data),
        )
        async with aclosing(self._loader.windows(file, held)) as windows:
            window = await anext(windows)  # the only one
        return window.samples or bytes(SAMPLE_BYTES * window.num_samples)
