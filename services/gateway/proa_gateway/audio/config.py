"""AudioOptions: the flags about audio files in requests."""

from dataclasses import dataclass
from typing import Final

from proa.options import check_options, option, parse_count

DECODING_BYTES: Final = 32 * 1024 * 1024
"""Memory that files which arrive leave for decoding: for one process and a window of up to four minutes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AudioOptions:
    """Raises `ValueError` for a value out of range."""

    max_audio_bytes: int = option(
        25 * 1024 * 1024,
        "limit of an audio file in bytes; beyond it 413. The limit of request bodies is not for these",
        parse=parse_count,
        minimum=1,
    )
    max_audio_seconds: int = option(7200, "limit of an audio file's duration in seconds; beyond it 400", minimum=1)
    max_audio_memory: int = option(
        512 * 1024 * 1024,
        "limit of the audio files, processes and samples of unfinished requests in bytes; beyond it 429",
        parse=parse_count,
        minimum=1,
    )
    audio_processes: int = option(
        2, "audio files that are decoded at the same time, each in a process of its own", minimum=1
    )
    audio_decode_timeout: float = option(
        30.0,
        "seconds that decoding a file may take, and one more for each minute of its audio; then 400. The time to "
        "wait for a turn or for memory; then 429",
        minimum=0.001,
    )

    def __post_init__(self) -> None:
        check_options(self)
        if self.max_audio_memory < self.max_audio_bytes + DECODING_BYTES:
            raise ValueError("--max-audio-memory must be larger than --max-audio-bytes by 32 MiB, to decode the file")

    @property
    def process_memory(self) -> int:
        """Bytes of address space of an audio process: 250 MB for its libraries, and some of the file's size."""
        return 448 * 1024 * 1024 + 3 * self.max_audio_bytes
