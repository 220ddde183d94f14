"""Qwen3-ASR (Shi et al., 2026, arXiv 2601.21337): Qwen3 with an encoder of its own, whose outputs stand in the prompt.

Three convolutions read a second of log-mel features at a time, then a transformer attends within windows of seconds.
Checkpoints have the names of Qwen's own library, as the released ones, or those of `transformers`.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from proa.contract import AsrPrompts, AudioInput, AudioLayer
from proa_engine.layers.norm import LayerNorm
from proa_engine.layers.vision import Dense
from proa_engine.layers.weights import Weights
from proa_engine.models.audio_config import AudioConfig
from proa_engine.models.config import DecoderOptions
from proa_engine.models.decoder import tensors_of
from proa_engine.models.families.qwen import Qwen3ForCausalLM
from proa_engine.models.families.qwen2_audio import AudioInPrompts
from proa_engine.models.fields import Fields, require
from proa_engine.models.image_files import AudioFiles
from proa_engine.models.log_mel import LogMel
from proa_engine.models.whisper_encoder import EPS, EncoderLayer, read_extractor

CONVOLUTION = AudioLayer(kernel=3, stride=2, padding=1)
NUM_CONVOLUTIONS = 3
MAX_SECONDS = 300  # of an audio. Qwen's own library reads 1,200; starts would take long to encode them once
CHUNKS_AT_ONCE = 32  # in the convolutions, whose results are larger than all others
_MAX_TIMESCALE = 10_000  # of the positions' slowest wave
_TOKEN, _MARKER = "<|audio_pad|>", "<asr_text>"
_MIN_SAMPLES = 8000  # where the feature extractor's file has none

# Names that the model was trained with, by the codes that transformers takes for them.
_LANGUAGES = """
ar:Arabic yue:Cantonese zh:Chinese cs:Czech da:Danish nl:Dutch en:English fil:Filipino fi:Finnish fr:French de:German
el:Greek hi:Hindi hu:Hungarian id:Indonesian it:Italian ja:Japanese ko:Korean mk:Macedonian ms:Malay fa:Persian
pl:Polish pt:Portuguese ro:Romanian ru:Russian es:Spanish sv:Swedish th:Thai tr:Turkish vi:Vietnamese
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3AsrEncoderOptions:
    input: AudioInput
    fft_size: int  # samples
    num_bands: int
    num_channels: int  # of the convolutions
    depth: int
    hidden_size: int
    inner_size: int
    num_heads: int
    num_chunks: int  # in a window of attention
    output_size: int  # the decoder's width

    @property
    def convolved(self) -> int:
        """Values of a frame behind the convolutions."""
        bands = self.num_bands
        for _ in range(NUM_CONVOLUTIONS):
            bands = CONVOLUTION.length(bands)
        return self.num_channels * bands

    def config(self) -> AudioConfig:
        size = self.hidden_size
        convolutions = 2 * (CONVOLUTION.kernel * self.num_channels) ** 2 + self.convolved * size
        first = CHUNKS_AT_ONCE * self.num_channels * self.num_bands * self.input.chunk // CONVOLUTION.stride**2
        return AudioConfig(
            input=self.input,
            embedding_width=self.output_size,
            num_parameters=self.depth * size * (4 * size + 2 * self.inner_size)
            + convolutions
            + size * (size + self.output_size),
            token_values=2 * (2 * size + self.inner_size) + first // self.input.max_tokens,
        )

    def make(self, weights: Weights) -> "Qwen3AsrEncoder":
        tower = weights / "thinker" / "audio_tower"
        if (tower / "proj1").has("weight"):
            return Qwen3AsrEncoder(tower, (tower / "proj1", tower / "proj2"), self)
        tower, projector = (weights / "model" / part for part in ("audio_tower", "multi_modal_projector"))
        return Qwen3AsrEncoder(tower, (projector / "linear_1", projector / "linear_2"), self)


class Qwen3AsrEncoder:
    """An `AudioEncoder`."""

    def __init__(self, tower: Weights, projector: tuple[Weights, Weights], options: Qwen3AsrEncoderOptions) -> None:
        size, audio = options.hidden_size, options.input
        self.chunk, self.window = audio.chunk, options.num_chunks * audio.num_tokens(audio.chunk * audio.hop)
        self.num_tokens, self.min_samples = audio.num_tokens, audio.min_samples
        channels = (1, *[options.num_channels] * NUM_CONVOLUTIONS)
        self.convolutions = [
            _Convolution(tower / f"conv2d{number}", *channels[number - 1 : number + 1])
            for number in range(1, NUM_CONVOLUTIONS + 1)
        ]
        self.join = (tower / "conv_out").take("weight", (size, options.convolved))
        self.layers = [
            EncoderLayer(tower / "layers" / str(number), size, options.inner_size, options.num_heads, has_key_bias=True)
            for number in range(options.depth)
        ]
        self.norm = LayerNorm(tower / "ln_post", size, EPS)
        self.first, self.second = Dense(projector[0], size, size), Dense(projector[1], size, options.output_size)
        self.positions = _waves(audio.num_tokens(audio.chunk * audio.hop), size).to(self.join)
        self.log_mel = LogMel(audio, num_bands=options.num_bands, fft_size=options.fft_size, device=self.join.device)

    def __call__(self, samples: torch.Tensor) -> torch.Tensor:
        """samples [n] float32 -> [tokens, output_size]"""
        count = samples.shape[0]
        features = self.log_mel(F.pad(samples, (0, max(self.min_samples - count, 0)))).to(self.join.dtype)
        padded = F.pad(features, (0, -features.shape[1] % self.chunk))
        chunks = padded.unflatten(1, (-1, self.chunk)).transpose(0, 1)[:, None]
        embedded = torch.cat([self._embed(part) for part in chunks.split(CHUNKS_AT_ONCE)])
        windows = embedded.flatten(0, 1)[: self.num_tokens(count)].split(self.window)
        x = self.norm(torch.cat([self._attend(window) for window in windows]))
        return self.second(F.gelu(self.first(x)))

    def _embed(self, x: torch.Tensor) -> torch.Tensor:
        """x [chunks, 1, bands, frames] -> [chunks, tokens of a chunk, hidden_size]"""
        for convolution in self.convolutions:
            x = F.gelu(convolution(x))
        return F.linear(x.permute(0, 3, 1, 2).flatten(2), self.join) + self.positions

    def _attend(self, x: torch.Tensor) -> torch.Tensor:
        """x [tokens of a window, hidden_size] -> the same shape"""
        for layer in self.layers:
            x = layer(x)
        return x

    def parameters(self) -> Iterator[torch.Tensor]:
        return tensors_of(self)


class _Convolution:
    """Over frequency and time."""

    def __init__(self, weights: Weights, in_size: int, out_size: int) -> None:
        self.weight = weights.take("weight", (out_size, in_size, CONVOLUTION.kernel, CONVOLUTION.kernel))
        self.bias = weights.take("bias", (out_size,))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.conv2d(x, self.weight, self.bias, CONVOLUTION.stride, CONVOLUTION.padding)


class Qwen3ASRForConditionalGeneration(AudioInPrompts, Qwen3ForCausalLM):
    """An `AudioReader` if its configuration has an audio encoder, a model of text otherwise."""

    @staticmethod
    def read_options(fields: Fields) -> DecoderOptions:
        require(fields, "classify_num", ())  # of Qwen3-ForcedAligner, which generates no text
        return Qwen3ForCausalLM.read_options(fields)

    @staticmethod
    def read_audio(fields: Fields, files: AudioFiles) -> Qwen3AsrEncoderOptions:
        audio = fields["audio_config"]
        require(audio, "activation_function", ("gelu",))
        require(audio, "scale_embedding", (False,))
        num_bands, chunk = audio.get("num_mel_bins", 128), 2 * audio.get("n_window", 50)
        extractor = read_extractor(files, num_bands)
        token_id = fields.get("audio_token_id", 151676)
        token = files.tokens.get(token_id, _TOKEN)
        input = AudioInput(
            sampling_rate=extractor["sampling_rate"],
            hop=extractor["hop_length"],
            pad_to=1,
            min_samples=max(extractor.get("min_length", _MIN_SAMPLES), extractor["n_fft"]),
            chunk=chunk,
            layers=(CONVOLUTION,) * NUM_CONVOLUTIONS,
            max_samples=MAX_SECONDS * extractor["sampling_rate"],
            token_id=token_id,
            token=token,
            placeholder=token,
            asr=_prompts(fields, files),
        )
        return Qwen3AsrEncoderOptions(
            input=input,
            fft_size=extractor["n_fft"],
            num_bands=num_bands,
            num_channels=audio.get("downsample_hidden_size", 480),
            depth=audio.get("encoder_layers", 24),
            hidden_size=audio.get("d_model", 1024),
            inner_size=audio.get("encoder_ffn_dim", 4096),
            num_heads=audio.get("encoder_attention_heads", 16),
            num_chunks=audio.get("n_window_infer", 800) // chunk,
            output_size=audio.get("output_dim", 3584),
        )


def _prompts(fields: Fields, files: AudioFiles) -> AsrPrompts | None:
    """How transcriptions begin. None: the tokenizer lacks the marker."""
    names = dict(each.split(":") for each in _LANGUAGES.split())
    known = fields.get("support_languages") or names.values()
    languages = {code: name for code, name in names.items() if name in known}
    found = (token_id for token_id, token in files.tokens.items() if token == _MARKER)
    return next((AsrPrompts(marker_id=each, marker=_MARKER, languages=languages) for each in found), None)


def _waves(length: int, size: int) -> torch.Tensor:
    """Sines, then cosines, of each position: [length, size] float32."""
    step = math.log(_MAX_TIMESCALE) / (size // 2 - 1)
    angles = torch.arange(length)[:, None] * torch.exp(-step * torch.arange(size // 2).float())
    return torch.cat([angles.sin(), angles.cos()], dim=1)
