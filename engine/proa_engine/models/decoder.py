"""The decoder of all architectures here. Each architecture declares its layers, and what is around them, in a
`DecoderOptions`.

A step of Llama with T tokens, in order (`DecoderLayer`, `Attention`, `GatedMLP`):

    x = embedding(ids)                              [T, hidden_size]
    for each layer:
        q, k, v = qkv(input_norm(x))                one product
        q, k = rotary(q, k); k, v to the cache      `rotate_and_cache`: one kernel
        y = attention(q, all k and v of its row)    `paged_attention`
        x = x + output(y)                           added by the next norm
        gate, up = gate_up(post_norm(x))            one product
        x = x + down(silu(gate) * up)               added by the next layer's first norm; a state that `Taps` may keep
    hidden = norm(x)                                the end of `__call__`
    logits = lm_head(hidden of sampled tokens)      [rows, vocab_size]: `compute_logits`
"""

import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from proa_engine.layers.attention_metadata import AttentionMetadata, AttentionStep
from proa_engine.layers.cache_layers import CacheLayer, LayerCache
from proa_engine.layers.embedding import LMHead, VocabParallelEmbedding, take_vocab_share
from proa_engine.layers.norm import LayerNorm, RMSNorm
from proa_engine.layers.parallel import LayerContext, ParallelContext
from proa_engine.layers.rotary import RotaryTables
from proa_engine.layers.weights import Weights
from proa_engine.models.base import ImageEncoder
from proa_engine.models.config import DecoderOptions, ModelConfig
from proa_engine.models.fields import Fields
from proa_engine.models.text_prefix import text_prefix

_log = logging.getLogger(__name__)
_OF_LIBRARIES = sys.stdlib_module_names | {"torch", "triton"}  # packages whose objects are not parts of models


class DecoderForCausalLM:
    """A `CausalLM` and a `StageModel`. The constructor loads all weights of `ModelConfig.stage`.

    An architecture is a derived class with `read_options`, which reads and checks its config.json, `defaults`, the
    fields that its config.json may omit, and `names`, as `Weights.names`. It overrides nothing else unless its decoder
    is more than its layers.
    """

    defaults: ClassVar[Mapping[str, Any]] = {}
    names: ClassVar[tuple[tuple[str, str], ...]] = ()
    embedding: VocabParallelEmbedding  # of the first pipeline stage alone, as is `norm`
    norm: RMSNorm | LayerNorm

    @staticmethod
    def read_options(fields: Fields) -> DecoderOptions:
        """Raises ValueError, naming the field, for what is not supported."""
        raise NotImplementedError

    def __init__(self, config: ModelConfig, weights: Weights, parallel: ParallelContext) -> None:
        options, stage = config.decoder, config.stage
        self.stage = stage
        inner, head = text_weights(weights)
        self.lm_head: LMHead | None = None
        if stage.is_first:
            rows = take_vocab_share(inner / "embed_tokens", config.vocab_size, config.hidden_size, parallel)
            self.embedding = VocabParallelEmbedding(rows, parallel)
            # In the weights' type, as in the models' own code.
            self.embedding_scale = float(torch.tensor(options.embedding_scale, dtype=rows.dtype))
        tables = RotaryTables(config.max_position_embeddings, weights.source.device)
        split = config.expert_split(parallel.world_size)
        by_expert = split is not None and split.by_expert
        context = LayerContext(config.hidden_size, parallel, tables, expert_parallel=by_expert)
        self.layers = [
            layer.make(inner / "layers" / str(number), context)
            for number, layer in enumerate(config.own_layers, start=stage.first)
        ]
        ends = tuple(accumulate(len(layer.cache_layers) for layer in self.layers))
        # Of each layer, which caches are its own. Computed once, because every step needs it.
        self.own_caches = tuple(map(slice, (0, *ends), ends))
        if stage.is_first:
            self.norm = options.norm.make(inner / "norm", config.hidden_size)
            if config.has_lm_head:
                if not config.tie_word_embeddings or head.has("weight"):
                    own = take_vocab_share(head, config.vocab_size, config.hidden_size, parallel)
                    rows = rows if config.tie_word_embeddings and _are_tied(rows, own, head) else own
                rows = F.normalize(rows) if options.normalizes_head else rows
                self.lm_head = LMHead(rows, config.vocab_size, parallel, batch_invariant=config.batch_invariant)
        self.prompt_embeds_scale = options.embedding_scale if options.scales_prompt_embeds else 1.0
        self.logits_scale, self.logits_soft_cap = options.logits_scale, options.logits_soft_cap
        self.batch_invariant = config.batch_invariant

    def __call__(
        self,
        inputs: torch.Tensor,
        positions: torch.Tensor,
        caches: Sequence[LayerCache],
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        x, step = self.begin(inputs, positions, metadata)
        residual: torch.Tensor | None = None
        taps = metadata.taps
        for number, (layer, own) in enumerate(zip(self.layers, self.own_caches, strict=True)):
            if number in taps.layers:
                taps.keep(number, total(x, residual))
            x, residual = layer(x, residual, caches[own], step)
        if len(self.layers) in taps.layers:
            taps.keep(len(self.layers), total(x, residual))
        if self.stage.count > 1:
            return total(x, residual)
        return self.norm(x) if residual is None else self.norm.add(x, residual)[0]

    def finish(self, result: torch.Tensor) -> torch.Tensor:
        return self.norm(result)

    def begin(
        self, inputs: torch.Tensor, positions: torch.Tensor, metadata: AttentionMetadata
    ) -> tuple[torch.Tensor, AttentionStep]:
        """The input of the first layer [T, hidden_size], and what all layers share. `inputs`: token ids [T], on a later
        pipeline stage the input itself."""
        if not self.stage.is_first:
            return inputs, AttentionStep(metadata, positions, self.batch_invariant)
        x = self.embedding(inputs)
        x = x if self.embedding_scale == 1.0 else x.mul_(self.embedding_scale)
        if (given := metadata.prompt_embeds) is not None:
            x.index_copy_(0, given.rows, given.embeddings * self.prompt_embeds_scale)
        return x, AttentionStep(metadata, positions, self.batch_invariant)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        assert self.lm_head is not None
        logits = self.lm_head(hidden)
        if self.logits_scale != 1.0:
            logits = logits * self.logits_scale
        if self.logits_soft_cap is not None:
            logits = (logits / self.logits_soft_cap).tanh_().mul_(self.logits_soft_cap)
        return logits

    def cache_layers(self) -> tuple[CacheLayer, ...]:
        return tuple(each for layer in self.layers for each in layer.cache_layers)

    def parameters(self) -> Iterator[torch.Tensor]:
        seen: set[int] = set()
        for tensor in tensors_of(self):
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield tensor


def total(x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
    """The state between two layers, [T, hidden_size]."""
    return x if residual is None else x + residual


def _are_tied(embedding: torch.Tensor, own: torch.Tensor, head: Weights) -> bool:
    """Whether the LM head's rows are those of the embedding, as config.json says. If not, they are kept, as
    `transformers` does; each rank decides for its own rows."""
    if torch.equal(embedding, own):
        return True
    _log.warning(
        "%s.weight differs from the embedding, though config.json has tie_word_embeddings: it is used, as transformers "
        "does",
        head.prefix,
    )
    return False


def text_weights(weights: Weights) -> tuple[Weights, Weights]:
    """The decoder's weights and the LM head's, by the names of a text model's checkpoint, or of a larger model's."""
    prefix = text_prefix(weights.has)
    return weights / prefix.decoder if prefix.decoder else weights, weights / prefix.head


def tensors_of(owner: object) -> Iterator[torch.Tensor]:
    """Yield every tensor that `owner`, its layers and lists of them hold."""
    if isinstance(owner, torch.Tensor):
        yield owner
    elif isinstance(owner, list | tuple):
        for item in owner:
            yield from tensors_of(item)
    elif type(owner).__module__.partition(".")[0] not in _OF_LIBRARIES and hasattr(owner, "__dict__"):
        for item in vars(owner).values():
            yield from tensors_of(item)


class ImageReadingDecoder(DecoderForCausalLM):
    """An `ImageReader` if its configuration has an image encoder, a model of text otherwise. Of several pipeline stages
    only the first reads images.

    An architecture that derives from it has `read_images` (`config.ImageModelClass`).
    """

    image_encoder: ImageEncoder

    def __init__(self, config: ModelConfig, weights: Weights, parallel: ParallelContext) -> None:
        super().__init__(config, weights, parallel)
        if config.image_encoder is not None and config.stage.is_first:
            self.image_encoder = config.image_encoder.make(weights)

    def begin(
        self, inputs: torch.Tensor, positions: torch.Tensor, metadata: AttentionMetadata
    ) -> tuple[torch.Tensor, AttentionStep]:
        x, step = super().begin(inputs, positions, metadata)
        if metadata.media is not None:
            x.index_copy_(0, metadata.media.rows, metadata.media.embeddings[:, : x.shape[1]])
        return x, step
