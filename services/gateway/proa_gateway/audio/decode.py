"""Audio files to windows of samples. Runs in processes of their own (`child.py`): FFmpeg reads hostile files here.

The first bytes of a file choose its format. FFmpeg never guesses one: a text in SDP that was sent as a file made it
open two UDP ports, one of them on all addresses. The six formats here refer to no other files or addresses.
"""

from collections.abc import Iterator
from io import BytesIO
from typing import Any, Final

import av
import numpy as np
import soxr
from av.audio.plane import AudioPlane
from av.audio.stream import AudioStream
from numpy.typing import NDArray

from proa_gateway.audio.windows import WindowCutter

Samples = NDArray[np.float32]

MIN_RATE: Final = 4_000
MAX_RATE: Final = 192_000
MAX_CHANNELS: Final = 8
_CODECS: Final = ("aac", "alac", "flac", "mp3", "mp3float", "opus", "vorbis")  # beside `pcm_*`
_CONTAINERS: Final = "WAV, FLAC, MP3, Ogg, MP4 (M4A) and WebM or Matroska"
_KNOWN: Final = {  # first bytes of files that are refused by their name
    b"FORM": "AIFF",
    b"#!AMR": "AMR",
    b".snd": "AU",
    b"caff": "CAF",
    b"0&\xb2u": "WMA",
    b"MThd": "MIDI",
}
_TYPES: Final = {"u8": "u1", "s16": "i2", "s32": "i4", "s64": "i8", "flt": "f4", "dbl": "f8"}
_SCALES: Final = {"u1": 2.0**-7, "i2": 2.0**-15, "i4": 2.0**-31, "i8": 2.0**-63}  # floats stay as they are


class AudioError(ValueError):
    """The file cannot be used. The message is for the client."""


def choose_format(data: bytes) -> str:
    """The name of FFmpeg's demuxer for the file, by its first bytes. Raises `AudioError`."""
    head = data[:12]
    if head[:4] in (b"RIFF", b"RF64") and head[8:12] == b"WAVE":
        return "wav"
    if head[:4] == b"fLaC":
        return "flac"
    if head[:4] == b"OggS":
        return "ogg"
    if head[:4] == b"\x1aE\xdf\xa3":
        return "matroska"
    if head[4:8] == b"ftyp":
        return "mov"
    if head[:3] == b"ID3" or _is_mp3_frame(head):
        return "mp3"
    if not data:
        raise AudioError("the file is empty")
    name = next((name for start, name in _KNOWN.items() if data.startswith(start)), None)
    found = "its first bytes are those of no such file" if name is None else f"it is {name}"
    raise AudioError(f"the formats are {_CONTAINERS}, {found}")


def _is_mp3_frame(head: bytes) -> bool:
    """Whether a frame of MPEG audio, layer III, begins here. AAC's frames have the same first bits and layer 0."""
    return len(head) >= 4 and head[0] == 0xFF and head[1] & 0xE6 == 0xE2 and head[2] & 0xF0 != 0xF0


def decode_windows(
    data: bytes, *, sampling_rate: int, max_window: int, max_samples: int
) -> Iterator[tuple[Samples, bool]]:
    """Yield the file's audio in windows of at most `max_window` samples, and whether each is the last one. They have
    one channel, the mean of all, at `sampling_rate`. Raises `AudioError`, also after the first windows."""
    cutter, num_samples = WindowCutter(max_window, sampling_rate), 0
    for samples in decode(data, sampling_rate):
        num_samples += len(samples)
        if num_samples > max_samples:
            raise AudioError(f"it is longer than {max_samples / sampling_rate:g} seconds, the limit")
        for window in cutter.add(samples):
            yield window, False
    if not num_samples:
        raise AudioError("it has no audio")
    yield cutter.rest(), True


def decode(data: bytes, sampling_rate: int) -> Iterator[Samples]:
    """Yield the samples of the file's first audio stream. Raises `AudioError`."""
    channels = _Channels(sampling_rate)
    try:
        with av.open(BytesIO(data), format=choose_format(data), metadata_errors="replace") as container:
            stream = _audio_stream(container.streams.audio)
            for frame in _frames(container, stream):
                yield from channels.add(frame)
    except av.error.FFmpegError as error:
        if isinstance(error, MemoryError):
            raise
        raise AudioError("it is damaged") from error
    yield from channels.flush()


def _audio_stream(streams: tuple[AudioStream, ...]) -> AudioStream:
    if not streams:
        raise AudioError("it has no audio")
    stream = streams[0]
    codec = stream.codec_context.name if stream.codec_context is not None else "unknown"
    if codec not in _CODECS and not codec.startswith("pcm_"):
        raise AudioError(f"the codec {codec} is not supported, only PCM, AAC, ALAC, FLAC, MP3, Opus and Vorbis")
    stream.codec_context.thread_count = 1
    return stream


def _frames(container: Any, stream: AudioStream) -> Iterator[av.AudioFrame]:
    """Yield the stream's frames. As FFmpeg's own programs do, leave out packets that cannot be decoded: cut MP3 files
    begin with one. Raises `AudioError` if there are more of them than of others."""
    num_decoded = num_damaged = 0
    for packet in container.demux(stream):
        try:
            frames = packet.decode()
        except av.error.InvalidDataError:
            num_damaged += 1
            continue
        num_decoded += bool(frames)
        yield from frames
    if num_damaged > num_decoded:
        raise AudioError("it is damaged")


class _Channels:
    """Frames to samples of one channel. A stream may change its rate and its channels, as MP3 files that were joined
    do."""

    def __init__(self, sampling_rate: int) -> None:
        self._sampling_rate = sampling_rate
        self._rate = sampling_rate  # of the frames
        self._resampler: soxr.ResampleStream | None = None  # None: no frame of another rate came since the last flush

    def add(self, frame: av.AudioFrame) -> Iterator[Samples]:
        rate, num_channels = frame.sample_rate, frame.layout.nb_channels
        if not MIN_RATE <= rate <= MAX_RATE:
            raise AudioError(f"it has {rate} samples a second, only {MIN_RATE} to {MAX_RATE} are supported")
        if not 1 <= num_channels <= MAX_CHANNELS:
            raise AudioError(f"it has {num_channels} channels, only 1 to {MAX_CHANNELS} are supported")
        if rate != self._rate:
            yield from self.flush()
            self._rate = rate
        yield self._resampled(_mean(frame, num_channels), is_last=False)

    def flush(self) -> Iterator[Samples]:
        """Yield what the resampler still has of the frames so far."""
        yield self._resampled(np.zeros(0, np.float32), is_last=True)
        self._resampler = None

    def _resampled(self, samples: Samples, *, is_last: bool) -> Samples:
        if self._rate == self._sampling_rate:
            return samples
        if self._resampler is None:
            self._resampler = soxr.ResampleStream(self._rate, self._sampling_rate, 1, dtype="float32", quality="HQ")
        resampled: Samples = self._resampler.resample_chunk(samples, last=is_last)
        return np.clip(resampled, -1, 1)


def _mean(frame: av.AudioFrame, num_channels: int) -> Samples:
    """The mean of the frame's channels, from -1 to 1. Not by FFmpeg's mixer, which is louder by the square root of two
    for a stereo file."""
    by_channel = _by_channel(frame, num_channels)
    with np.errstate(invalid="ignore"):  # of infinities, which are refused below
        mean: NDArray[Any] = by_channel.mean(axis=0, dtype=np.float64)
    if by_channel.dtype.kind == "u":
        mean -= 128.0
    mean *= _SCALES.get(by_channel.dtype.str[1:], 1.0)
    if not np.isfinite(mean).all():
        raise AudioError("it has samples that are no numbers")
    samples: Samples = np.clip(mean, -1, 1).astype(np.float32)
    return samples


def _by_channel(frame: av.AudioFrame, num_channels: int) -> NDArray[Any]:
    """Not by `frame.to_ndarray`: of eight planes, PyAV 18.1 reads on behind the last one."""
    dtype, is_planar = np.dtype(_TYPES[frame.format.packed.name]), frame.format.is_planar
    count = frame.samples * (1 if is_planar else num_channels)
    planes = [
        np.frombuffer(memoryview(AudioPlane(frame, index)), dtype, count)
        for index in range(num_channels if is_planar else 1)
    ]
    return np.stack(planes) if is_planar else planes[0].reshape(-1, num_channels).T
