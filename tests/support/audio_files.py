"""Audio files for tests, encoded by PyAV."""

from io import BytesIO
from typing import Any

import av
import numpy as np
from numpy.typing import NDArray

FORMATS = {
    "wav": ("wav", "pcm_s16le"),
    "wav of 24 bits": ("wav", "pcm_s24le"),
    "wav of floats": ("wav", "pcm_f32le"),
    "wav of bytes": ("wav", "pcm_u8"),
    "flac": ("flac", "flac"),
    "mp3": ("mp3", "libmp3lame"),
    "ogg opus": ("ogg", "libopus"),
    "ogg vorbis": ("ogg", "vorbis"),
    "m4a": ("ipod", "aac"),
    "m4a lossless": ("ipod", "alac"),
    "mov": ("mov", "pcm_s16be"),
    "webm": ("webm", "libopus"),
    "mkv": ("matroska", "flac"),
}
"""FFmpeg's names of container and codec."""
Samples = NDArray[np.float32]


def tone(seconds: float, rate: int, *, frequency: float = 440.0, level: float = 0.5) -> Samples:
    return (level * np.sin(2 * np.pi * frequency * np.arange(round(seconds * rate)) / rate)).astype(np.float32)


def encode(samples: Samples, rate: int, name: str = "wav", *, options: dict[str, str] | None = None) -> bytes:
    """A file of one of the `FORMATS`. `samples`: of one channel, or by channel."""
    by_channel = np.atleast_2d(samples)
    layout = {1: "mono", 2: "stereo", 4: "quad", 6: "5.1", 8: "7.1"}[len(by_channel)]
    container, codec = FORMATS[name]
    file = BytesIO()
    with av.open(file, "w", format=container) as output:
        stream: Any = output.add_stream(codec, rate=rate, layout=layout, options=options or {"strict": "-2"})
        resampler = av.AudioResampler(format=stream.format.name, layout=layout, rate=rate)
        for start in range(0, by_channel.shape[1], 1024):
            part = by_channel[:, start : start + 1024].T.reshape(1, -1)
            frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(part), format="flt", layout=layout)
            frame.sample_rate, frame.pts = rate, start
            for converted in resampler.resample(frame):
                output.mux(stream.encode(converted))
        output.mux(stream.encode(None))
    return file.getvalue()
