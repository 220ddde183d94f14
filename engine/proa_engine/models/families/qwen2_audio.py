"""Qwen2-Audio (Chu et al., 2024, arXiv 2407.10759): Qwen2 with Whisper's encoder, whose outputs are averaged by pairs
and stand in the prompt."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from proa.contract import AudioInput, AudioLayer
from proa_engine.layers.attention_metadata import AttentionMetadata, AttentionStep
from proa_engine.layers.parallel import ParallelContext
from proa_engine.layers.vision import Dense
from proa_engine.layers.weights import Weights
from proa_engine.models.audio_config import AudioConfig
from proa_engine.models.base import AudioEncoder
from proa_engine.models.config import ModelConfig
from proa_engine.models.decoder import DecoderForCausalLM, tensors_of
from proa_engine.models.families.qwen import Qwen2ForCausalLM
from proa_engine.models.fields import Fields, require
from proa_engine.models.image_files import AudioFiles
from proa_engine.models.whisper_encoder import CONVOLUTIONS, WhisperEncoder, WhisperEncoderOptions, read_extractor

POOLING = AudioLayer(kernel=2, stride=2)

_TOKEN = "<|AUDIO|>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen2AudioEncoderOptions:
    whisper: WhisperEncoderOptions
    output_size: int  # the decoder's width

    def config(self) -> AudioConfig:
        config = self.whisper.config()
        return replace(
            config,
            embedding_width=self.output_size,
            num_parameters=config.num_parameters + self.whisper.hidden_size * self.output_size,
            token_values=POOLING.stride * config.token_values,
        )

    def make(self, weights: Weights) -> "Qwen2AudioEncoder":
        return Qwen2AudioEncoder(weights, self)


class Qwen2AudioEncoder:
    """An `AudioEncoder`. Frames behind the audio's end are not attended to."""

    def __init__(self, weights: Weights, options: Qwen2AudioEncoderOptions) -> None:
        # The names depend on the release that wrote the checkpoint.
        outer = weights if weights.has("multi_modal_projector.linear.weight") else weights / "model"
        self.hop = options.whisper.input.hop
        self.whisper = WhisperEncoder(outer / "audio_tower", options.whisper)
        self.projector = Dense(
            outer / "multi_modal_projector" / "linear", options.whisper.hidden_size, options.output_size
        )

    def __call__(self, samples: torch.Tensor) -> torch.Tensor:
        """samples [n] float32 -> [tokens, output_size]"""
        length = -(-samples.shape[0] // self.hop)
        for layer in CONVOLUTIONS:
            length = layer.length(length)
        x = self.whisper.transform(self.whisper.embed(samples)[:length])
        pairs = x[: POOLING.length(length) * POOLING.stride].unflatten(0, (-1, POOLING.stride))
        return self.projector(self.whisper.norm(pairs.mean(1)))

    def parameters(self) -> Iterator[torch.Tensor]:
        return tensors_of(self)


class AudioInPrompts(DecoderForCausalLM):
    """A decoder whose prompts have encoded audio. Of several pipeline stages only the first reads it."""

    audio_encoder: AudioEncoder

    def __init__(self, config: ModelConfig, weights: Weights, parallel: ParallelContext) -> None:
        super().__init__(config, weights, parallel)
        if config.audio_encoder and config.stage.is_first:
            self.audio_encoder = config.audio_encoder.make(weights)

    def begin(
        self, inputs: torch.Tensor, positions: torch.Tensor, metadata: AttentionMetadata
    ) -> tuple[torch.Tensor, AttentionStep]:
        x, step = super().begin(inputs, positions, metadata)
        if metadata.media is not None:
            x.index_copy_(0, metadata.media.rows, metadata.media.embeddings)
        return x, step


class Qwen2AudioForConditionalGeneration(AudioInPrompts, Qwen2ForCausalLM):
    """An `AudioReader` if its configuration has an audio encoder, a model of text otherwise."""

    @staticmethod
    def read_audio(fields: Fields, files: AudioFiles) -> Qwen2AudioEncoderOptions:
        audio = fields["audio_config"]
        require(audio, "activation_function", ("gelu",))
        extractor = read_extractor(files, audio.get("num_mel_bins", 128))
        token_id = fields["audio_token_id"] if "audio_token_id" in fields else fields["audio_token_index"]
        token = files.tokens.get(token_id, _TOKEN)
        input = AudioInput(
            sampling_rate=extractor["sampling_rate"],
            hop=extractor["hop_length"],
            pad_to=extractor["hop_length"],
            layers=(*CONVOLUTIONS, POOLING),
            max_samples=extractor["chunk_length"] * extractor["sampling_rate"],
            token_id=token_id,
            token=token,
            placeholder=token,
        )
        whisper = WhisperEncoderOptions(
            input=input,
            fft_size=extractor["n_fft"],
            num_bands=audio.get("num_mel_bins", 128),
            depth=audio.get("encoder_layers", 32),
            hidden_size=audio.get("d_model", 1280),
            inner_size=audio.get("encoder_ffn_dim", 5120),
            num_heads=audio.get("encoder_attention_heads", 20),
            num_positions=audio.get("max_source_positions", 1500),
        )
        require(audio, "max_source_positions", (input.max_samples // input.hop // CONVOLUTIONS[1].stride,))
        return Qwen2AudioEncoderOptions(whisper=whisper, output_size=fields["hidden_size"])
