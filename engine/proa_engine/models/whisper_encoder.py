"""Whisper's encoder (Radford et al., 2022, arXiv 2212.04356): two convolutions over log-mel features, then a
transformer whose frames all attend to each other."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from proa.contract import AudioInput, AudioLayer
from proa_engine.layers.norm import LayerNorm
from proa_engine.layers.vision import Dense, FeedForward, attend
from proa_engine.layers.weights import Weights
from proa_engine.models.audio_config import AudioConfig
from proa_engine.models.decoder import tensors_of
from proa_engine.models.fields import Fields, require
from proa_engine.models.image_files import AudioFiles
from proa_engine.models.log_mel import LogMel

KERNEL = 3
CONVOLUTIONS = (AudioLayer(kernel=KERNEL, stride=1, padding=1), AudioLayer(kernel=KERNEL, stride=2, padding=1))

EPS = 1e-5
# Where a folder has no file of a feature extractor, or one without the field: those of `transformers`.
_EXTRACTOR = {"sampling_rate": 16_000, "hop_length": 160, "n_fft": 400, "chunk_length": 30}
_FLOAT16_LIMIT = torch.finfo(torch.float16).max - 1000  # as in transformers


@dataclass(frozen=True, slots=True, kw_only=True)
class WhisperEncoderOptions:
    input: AudioInput
    fft_size: int  # samples
    num_bands: int
    depth: int
    hidden_size: int
    inner_size: int
    num_heads: int
    num_positions: int  # tokens of the longest audio
    alignment_heads: tuple[tuple[int, int], ...] = ()  # of a decoder that reads by cross-attention

    def config(self) -> AudioConfig:
        layer = self.hidden_size * (4 * self.hidden_size + 2 * self.inner_size)
        convolutions = KERNEL * self.hidden_size * (self.num_bands + self.hidden_size)
        return AudioConfig(
            input=self.input,
            embedding_width=self.hidden_size,
            alignment_heads=self.alignment_heads,
            num_parameters=self.depth * layer + convolutions + self.num_positions * self.hidden_size,
            token_values=4 * (2 * self.hidden_size + self.inner_size),
        )

    def make(self, weights: Weights) -> "WhisperEncoder":
        return WhisperEncoder(weights / "model" / "encoder", self)


class WhisperEncoder:
    """An `AudioEncoder`. `weights` are its own. Audio is padded with zeros to the longest that it can encode."""

    def __init__(self, weights: Weights, options: WhisperEncoderOptions) -> None:
        size, audio = options.hidden_size, options.input
        self.num_samples = options.num_positions * CONVOLUTIONS[1].stride * audio.hop
        self.first = _Convolution(weights / "conv1", options.num_bands, size, CONVOLUTIONS[0])
        self.second = _Convolution(weights / "conv2", size, size, CONVOLUTIONS[1])
        self.positions = (weights / "embed_positions").take("weight", (options.num_positions, size))
        self.layers = [
            EncoderLayer(
                weights / "layers" / str(number), size, options.inner_size, options.num_heads, has_key_bias=False
            )
            for number in range(options.depth)
        ]
        self.norm = LayerNorm(weights / "layer_norm", size, EPS)
        self.log_mel = LogMel(
            audio, num_bands=options.num_bands, fft_size=options.fft_size, device=self.positions.device
        )

    def __call__(self, samples: torch.Tensor) -> torch.Tensor:
        """samples [n] float32 -> [tokens, hidden_size]"""
        return self.norm(self.transform(self.embed(samples)))

    def embed(self, samples: torch.Tensor) -> torch.Tensor:
        """samples [n] float32 -> [positions, hidden_size], those of the padding too"""
        padded = F.pad(samples, (0, self.num_samples - samples.shape[0]))
        features = self.log_mel(padded).to(self.positions.dtype)
        return F.gelu(self.second(F.gelu(self.first(features)))).t() + self.positions

    def transform(self, x: torch.Tensor) -> torch.Tensor:
        """x [positions, hidden_size] -> the same shape, before the last norm"""
        for layer in self.layers:
            x = layer(x)
        return x

    def parameters(self) -> Iterator[torch.Tensor]:
        return tensors_of(self)


class _Convolution:
    def __init__(self, weights: Weights, in_size: int, out_size: int, layer: AudioLayer) -> None:
        self.weight = weights.take("weight", (out_size, in_size, layer.kernel))
        self.bias = weights.take("bias", (out_size,))
        self.stride, self.padding = layer.stride, layer.padding

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [in_size, frames] -> [out_size, frames / stride]"""
        return F.conv1d(x[None], self.weight, self.bias, self.stride, self.padding)[0]


class EncoderLayer:
    def __init__(
        self, weights: Weights, hidden_size: int, inner_size: int, num_heads: int, *, has_key_bias: bool
    ) -> None:
        size, attention = hidden_size, weights / "self_attn"
        self.num_heads = num_heads
        self.attention_norm = LayerNorm(weights / "self_attn_layer_norm", size, EPS)
        self.query, self.value = Dense(attention / "q_proj", size, size), Dense(attention / "v_proj", size, size)
        self.key = Dense(attention / "k_proj", size, size, bias=has_key_bias)
        self.output = Dense(attention / "out_proj", size, size)
        self.mlp_norm = LayerNorm(weights / "final_layer_norm", size, EPS)
        up, down = Dense(weights / "fc1", size, inner_size), Dense(weights / "fc2", inner_size, size)
        self.mlp = FeedForward(up, down, F.gelu)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [frames, hidden_size] -> the same shape"""
        normed = self.attention_norm(x)
        inputs = (self.query, self.key, self.value)
        heads = (project(normed).unflatten(1, (self.num_heads, -1)) for project in inputs)
        x = x + self.output(attend(*heads))
        x = x + self.mlp(self.mlp_norm(x))
        return x.clamp(-_FLOAT16_LIMIT, _FLOAT16_LIMIT) if x.dtype == torch.float16 else x


def read_extractor(files: AudioFiles, num_bands: int) -> Fields:
    """The fields of the feature extractor. Raises ValueError, naming the field, for what is not supported."""
    extractor = {**_EXTRACTOR, **files.extractor}
    require(extractor, "dither", (0, 0.0))
    require(extractor, "feature_size", (num_bands,))
    return extractor
