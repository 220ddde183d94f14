"""Audio: a recording that a request reads, how a model reads it, and its number of tokens."""

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Final

SAMPLE_BYTES: Final = 4

_HASH_BYTES: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Audio:
    """One recording, with one channel and the sampling rate of the model's `AudioInput`. Until it has a place, `offset`
    is 0. With cross-attention it has no tokens in the prompt: `offset` and `num_tokens` are 0."""

    hash: bytes  # `hash_audio`
    offset: int = 0  # prompt tokens before its first one
    num_tokens: int = 0  # of the prompt
    num_samples: int
    # little-endian float32; empty: the engine has kept those of this hash
    samples: bytes = field(default=b"", repr=False)

    @property
    def end(self) -> int:
        """The number of prompt tokens up to its last one."""
        return self.offset + self.num_tokens

    @property
    def data(self) -> bytes:
        """Its samples."""
        return self.samples

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.num_samples,)


@dataclass(frozen=True, slots=True, kw_only=True)
class AudioLayer:
    """A convolution or a pooling along time, in frames."""

    kernel: int
    stride: int
    padding: int = 0  # frames of zeros at each end

    def length(self, num_frames: int) -> int:
        """Return the number of frames that it makes of `num_frames`."""
        return max(0, (num_frames + 2 * self.padding - self.kernel) // self.stride + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class WhisperPrompts:
    """What prompts and outputs of a Whisper model consist of: token ids, and two limits."""

    decoder_start_token_id: int
    languages: Mapping[str, int] = field(default_factory=dict, hash=False)  # by codes such as "en"
    tasks: Mapping[str, int] = field(default_factory=dict, hash=False)  # "transcribe" and "translate"
    no_timestamps_token_id: int | None = None  # None: it writes no timestamps
    timestamp_begin_id: int | None = None  # of 0.00 seconds
    prev_sot_token_id: int | None = None  # before text that precedes the audio; None: prompts have none
    no_speech_token_id: int | None = None
    suppress_tokens: tuple[int, ...] = ()
    begin_suppress_tokens: tuple[int, ...] = ()  # not the first token of an output
    max_initial_timestamp_index: int | None = None  # of the first timestamp, counted from `timestamp_begin_id`
    max_target_positions: int  # tokens of prompt and output together
    is_multilingual: bool = False  # prompts have a language and a task


@dataclass(frozen=True, slots=True, kw_only=True)
class AsrPrompts:
    """How transcriptions by a model with a chat template begin: `language English<asr_text>`, at the end of the prompt
    if the language is known, otherwise in the output."""

    marker_id: int  # the token of `<asr_text>`, behind which the text begins
    marker: str  # its text
    languages: Mapping[str, str] = field(hash=False)  # names by codes such as "en"


@dataclass(frozen=True, slots=True, kw_only=True)
class TimestampRules:
    """An output has Whisper's timestamps: they come in pairs, around text, and do not go back; the first token is one.
    If all timestamps together are more likely than the most likely text token, a timestamp is sampled."""

    begin_id: int  # the token of 0.00 seconds; all from it on are timestamps
    no_timestamps_id: int  # is never sampled
    end_id: int  # of the end of sequence; all tokens below it are text
    max_initial_index: int | None = None  # of the first timestamp, counted from `begin_id`; None: any


@dataclass(frozen=True, slots=True, kw_only=True)
class AudioInput:
    """How a model reads audio: at which rate, how many tokens it has, and how it stands in a prompt."""

    sampling_rate: int  # samples a second
    hop: int  # samples from one frame to the next
    pad_to: int  # audio is padded to a multiple of so many samples; samples that make no whole frame are left out
    min_samples: int = 0  # shorter audio is padded to so many
    chunk: int = 0  # frames that pass the layers together; 0: all
    layers: tuple[AudioLayer, ...] = ()  # make tokens of frames
    max_samples: int
    cross_attention: bool = False  # each request has one audio, which all its tokens read; it has none in the prompt
    token_id: int = 0  # stands in the prompt once for each token of an audio
    token: str = ""  # its text
    placeholder: str = ""  # what the chat template writes for an audio; `prefix`, tokens and `suffix` replace it
    prefix: str = ""
    suffix: str = ""
    whisper: WhisperPrompts | None = None  # None: it is another model
    asr: AsrPrompts | None = None  # None: it transcribes in another way, or not

    @property
    def max_tokens(self) -> int:
        """Number of tokens of the longest audio."""
        return self.num_tokens(self.max_samples)

    def num_tokens(self, num_samples: int) -> int:
        """Return the number of tokens that the model's encoder makes of so many samples."""
        num_frames = -(-max(num_samples, self.min_samples) // self.pad_to) * self.pad_to // self.hop
        num_chunks, rest = divmod(num_frames, self.chunk or num_frames or 1)
        return num_chunks * self._length(self.chunk or num_frames) + self._length(rest)

    def _length(self, num_frames: int) -> int:
        for layer in self.layers:
            num_frames = layer.length(num_frames)
        return num_frames


def hash_audio(samples: bytes) -> bytes:
    """Return the first 16 bytes of the SHA-256 over the number of samples and the samples. Takes 1 ms for a minute."""
    digest = sha256(struct.pack("<I", len(samples) // SAMPLE_BYTES))
    digest.update(samples)
    return digest.digest()[:_HASH_BYTES]
