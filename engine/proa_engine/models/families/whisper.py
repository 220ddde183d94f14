"""Whisper (Radford et al., 2022, arXiv 2212.04356) and Distil-Whisper: a decoder whose tokens also read an encoded
audio by cross-attention. Positions are learned, norms have biases, keys have none."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from proa.contract import AudioInput, WhisperPrompts
from proa_engine.layers.attention import AttentionOptions
from proa_engine.layers.attention_metadata import AttentionMetadata, AttentionStep
from proa_engine.layers.cache_layers import CacheLayer, CrossLayer, KeyValueLayer, LayerCache
from proa_engine.layers.cross_attention import CrossAttention, CrossAttentionOptions
from proa_engine.layers.mlp import UngatedMLPOptions
from proa_engine.layers.norm import LayerNormOptions
from proa_engine.layers.parallel import LayerContext, ParallelContext
from proa_engine.layers.rotary import RopeConfig
from proa_engine.layers.weights import Weights
from proa_engine.models import fields as read
from proa_engine.models.base import AudioEncoder
from proa_engine.models.config import DecoderOptions, ModelConfig
from proa_engine.models.decoder import DecoderForCausalLM, text_weights
from proa_engine.models.decoder_layer import FeedForwardOptions
from proa_engine.models.image_files import AudioFiles
from proa_engine.models.whisper_encoder import CONVOLUTIONS, WhisperEncoderOptions, read_extractor

NORM = LayerNormOptions(1e-5)


@dataclass(frozen=True, slots=True, kw_only=True)
class WhisperLayerOptions:
    """A `LayerDeclaration`."""

    attention: AttentionOptions
    cross: CrossAttentionOptions
    mlp: FeedForwardOptions

    @property
    def routed_experts(self) -> None:
        return None

    @property
    def cache_kinds(self) -> tuple[type[CacheLayer], ...]:
        return KeyValueLayer, CrossLayer

    def num_parameters(self, hidden_size: int) -> int:
        parts = self.attention, self.cross, self.mlp
        return sum(part.num_parameters(hidden_size) for part in parts)

    def num_copied(self, hidden_size: int, num_ranks: int) -> int:
        return self.attention.num_copied(hidden_size, num_ranks)

    def make(self, weights: Weights, context: LayerContext) -> "WhisperLayer":
        return WhisperLayer(weights, context, self)


class WhisperLayer:
    def __init__(self, weights: Weights, context: LayerContext, options: WhisperLayerOptions) -> None:
        size = context.hidden_size
        self.attention_norm = NORM.make(weights / "self_attn_layer_norm", size)
        self.attention = options.attention.make(weights, context)
        self.cross_norm = NORM.make(weights / "encoder_attn_layer_norm", size)
        self.cross = options.cross.make(weights, context)
        self.mlp_norm = NORM.make(weights / "final_layer_norm", size)
        self.mlp = options.mlp.make(weights, context)

    @property
    def cache_layers(self) -> tuple[CacheLayer, ...]:
        return self.attention.cache_layer, self.cross.cache_layer

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, caches: Sequence[LayerCache], step: AttentionStep
    ) -> tuple[torch.Tensor, None]:
        """x [T, hidden_size] is the sum itself."""
        own, audio = caches
        x = x + self.attention(self.attention_norm(x), own, step)
        x = x + self.cross(self.cross_norm(x), audio, step)
        return x + self.mlp(self.mlp_norm(x)), None


class WhisperForConditionalGeneration(DecoderForCausalLM):
    """A `CrossReader`."""

    audio_encoder: AudioEncoder

    defaults: ClassVar[read.Fields] = {"tie_word_embeddings": True, "max_source_positions": 1500, "num_mel_bins": 80}
    names: ClassVar[tuple[tuple[str, str], ...]] = (
        ("norm", "layer_norm"),
        ("o_proj", "out_proj"),
        ("mlp.up_proj", "fc1"),
        ("mlp.down_proj", "fc2"),
    )

    @staticmethod
    def read_options(fields: read.Fields) -> DecoderOptions:
        read.require(fields, "activation_function", ("gelu",))
        num_heads, hidden_size = fields["num_attention_heads"], fields["hidden_size"]
        head_dim = hidden_size // num_heads
        attention = AttentionOptions(
            num_heads=num_heads,
            num_kv_heads=num_heads,
            head_dim=head_dim,
            rope=RopeConfig(dim=head_dim, type="none"),
            qkv_bias=True,
            key_bias=False,
            output_bias=True,
        )
        layer = WhisperLayerOptions(
            attention=attention,
            cross=CrossAttentionOptions(
                num_heads=num_heads, head_dim=head_dim, num_tokens=fields["max_source_positions"]
            ),
            mlp=UngatedMLPOptions(inner_size=fields["intermediate_size"], activation="gelu", bias=True),
        )
        return DecoderOptions(
            layers=(layer,) * fields["num_hidden_layers"],
            norm=NORM,
            embedding_scale=hidden_size**0.5 if fields.get("scale_embedding") else 1.0,
            num_positions=fields["max_position_embeddings"],
            needs_token_ids="its requests have audio in place of a prompt's content",
            undivided="every stage would need the encoded audio",
        )

    @staticmethod
    def read_audio(fields: read.Fields, files: AudioFiles) -> WhisperEncoderOptions:
        extractor = read_extractor(files, fields["num_mel_bins"])
        num_samples = extractor["chunk_length"] * extractor["sampling_rate"]
        input = AudioInput(
            sampling_rate=extractor["sampling_rate"],
            hop=extractor["hop_length"],
            pad_to=num_samples,
            layers=CONVOLUTIONS,
            max_samples=num_samples,
            cross_attention=True,
            whisper=_prompts(fields, files.generation),
        )
        read.require(fields, "max_source_positions", (input.max_tokens,))
        return WhisperEncoderOptions(
            input=input,
            fft_size=extractor["n_fft"],
            num_bands=fields["num_mel_bins"],
            depth=fields["encoder_layers"],
            hidden_size=fields["hidden_size"],
            inner_size=fields["encoder_ffn_dim"],
            num_heads=fields["encoder_attention_heads"],
            num_positions=fields["max_source_positions"],
            alignment_heads=_alignment_heads(fields, files.generation.get("alignment_heads")),
        )

    def __init__(self, config: ModelConfig, weights: Weights, parallel: ParallelContext) -> None:
        super().__init__(config, weights, parallel)
        inner, _ = text_weights(weights)
        shape = config.decoder.num_positions, config.hidden_size
        self.positions = (inner / "embed_positions").take("weight", shape)
        assert config.audio_encoder, "check_reads_audio refuses a model without it"
        self.audio_encoder = config.audio_encoder.make(weights)

    def begin(
        self, inputs: torch.Tensor, positions: torch.Tensor, metadata: AttentionMetadata
    ) -> tuple[torch.Tensor, AttentionStep]:
        x, step = super().begin(inputs, positions, metadata)
        return x + self.positions.index_select(0, positions), step

    def cross_layers(self, caches: Sequence[LayerCache]) -> list[tuple[CrossAttention, LayerCache]]:
        found = []
        for layer, own in zip(self.layers, self.own_caches, strict=True):
            assert isinstance(layer, WhisperLayer)
            found.append((layer.cross, caches[own][1]))
        return found


def _alignment_heads(fields: read.Fields, listed: Sequence[Sequence[int]] | None) -> tuple[tuple[int, int], ...]:
    """The heads of generation_config.json."""
    heads = tuple((layer, head) for layer, head in listed or ())
    num_layers, num_heads = fields["num_hidden_layers"], fields["num_attention_heads"]
    for layer, head in heads:
        if not 0 <= layer < num_layers or not 0 <= head < num_heads:
            raise ValueError(f"alignment_heads has head {head} of layer {layer}; {num_layers} layers have {num_heads}")
    return heads


def _prompts(fields: read.Fields, generation: Mapping[str, Any]) -> WhisperPrompts:
    """What prompts consist of. Older checkpoints have some of it in config.json, and fine-tuned models whose files are
    older than a field lack it."""
    given = {**fields, **{name: value for name, value in generation.items() if value is not None}}
    languages, no_timestamps = given.get("lang_to_id", {}), given.get("no_timestamps_token_id")
    return WhisperPrompts(
        decoder_start_token_id=given["decoder_start_token_id"],
        languages={token.strip("<|>"): token_id for token, token_id in languages.items()},
        tasks=given.get("task_to_id", {}),
        no_timestamps_token_id=no_timestamps,
        timestamp_begin_id=no_timestamps + 1 if no_timestamps else None,
        prev_sot_token_id=given.get("prev_sot_token_id"),
        no_speech_token_id=no_timestamps - 1 if no_timestamps else None,
        suppress_tokens=_tokens(given.get("suppress_tokens")),
        begin_suppress_tokens=_tokens(given.get("begin_suppress_tokens")),
        max_initial_timestamp_index=given.get("max_initial_timestamp_index"),
        max_target_positions=fields["max_position_embeddings"],
        is_multilingual=given.get("is_multilingual", bool(languages)),
    )


def _tokens(listed: Sequence[int] | None) -> tuple[int, ...]:
    """A list without -1, which stood for tokens that are no speech."""
    return tuple(token_id for token_id in listed or () if token_id >= 0)
