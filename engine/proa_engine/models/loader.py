"""Build a model's architecture with the weights of its folder."""

import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch

from proa_engine.config import LoadFormat
from proa_engine.layers.parallel import ParallelContext
from proa_engine.layers.weights import Weights, WeightSource
from proa_engine.models.base import CausalLM, Classifier
from proa_engine.models.checkpoint import RandomWeights, SafetensorsCheckpoint
from proa_engine.models.config import ModelClass, ModelConfig
from proa_engine.models.decoder import text_weights
from proa_engine.models.digest import WeightsDigest
from proa_engine.models.pooling_heads import DenseHead, PoolingHeads, Score
from proa_engine.models.registry import model_class


def load_model(
    folder: Path,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    parallel: ParallelContext,
    load_format: LoadFormat = "auto",
    seed: int = 0,
    report: Callable[[str], None],
    digest: WeightsDigest | None = None,
) -> CausalLM:
    """Build this rank's shard of the model, ready to run: the layers of `config.stage`.

    `seed` is that of dummy weights, which are the same for any number of ranks on the same kind of device. What is read
    of the checkpoint is added to `digest`. Raises ValueError or FileNotFoundError if the weights do not fit `config`.
    """
    build: ModelClass = model_class(config.architecture)
    if load_format == "dummy":
        report("making random weights")
        return build(config, Weights(RandomWeights(seed, dtype, device), config.linear_method), parallel)
    started = time.monotonic()
    with SafetensorsCheckpoint(folder, dtype, device, digest) as checkpoint:
        weights = Weights(checkpoint, config.linear_method)
        layers = (text_weights(weights)[0] / "layers" / "").prefix
        checkpoint.begin(lambda name: _is_redundant(name, config) or _is_of_other_stage(name, config, layers), report)
        model = build(config, weights, parallel)
        checkpoint.finish()
    report(f"weights loaded in {time.monotonic() - started:.1f} s")
    return model


def load_pooling_heads(
    folder: Path,
    config: ModelConfig,
    model: CausalLM,
    *,
    device: torch.device,
    load_format: LoadFormat = "auto",
    seed: int = 0,
) -> PoolingHeads:
    """Load what follows the pooling of `model`: sentence-transformers' layers, and a decoder's `score`, where an
    encoder has a head of its own. Raises ValueError or FileNotFoundError as `load_model` does."""

    with ExitStack() as sources:

        def make_source(of: Path) -> WeightSource:
            if load_format == "dummy":
                return RandomWeights(seed, torch.float32, device)
            return sources.enter_context(SafetensorsCheckpoint(of, torch.float32, device))

        pooling = config.pooling
        dense = [DenseHead.load(each, make_source(each.folder)) for each in pooling.dense]
        if isinstance(model, Classifier):
            return PoolingHeads(pooling, dense, model.classify)
        score = Score.load(pooling, config.hidden_size, make_source(folder)) if pooling.labels else None
        return PoolingHeads(pooling, dense, score)


def _is_of_other_stage(name: str, config: ModelConfig, layers: str) -> bool:
    """Whether another pipeline stage loads a checkpoint's tensor. `layers`: how names of the layers' tensors begin."""
    if not name.startswith(layers):
        return not config.stage.is_first
    return name.removeprefix(layers).partition(".")[0] in config.stage.others(len(config.layers))


def _is_redundant(name: str, config: ModelConfig) -> bool:
    """Whether a checkpoint's tensor is not needed: it can be derived from others, or is of another input than text, or
    predicts several tokens (Qwen's `mtp`, DeepSeek's layers behind the last one), or pools an image (SigLIP's head)."""
    drafting = range(len(config.layers), len(config.layers) + config.num_nextn_layers)
    if name.startswith(("mtp.", *(f"model.layers.{number}." for number in drafting))):
        return True
    if "vision_tower." in name and ".head." in name:
        return True
    if name.startswith("score.") and config.pooling.labels:  # a head of `load_pooling_heads`
        return True
    if name.endswith("lm_head.weight") and not config.has_lm_head:
        return True
    if name.endswith("rotary_emb.inv_freq") or (config.tie_word_embeddings and name.endswith("lm_head.weight")):
        return True
    return config.is_text_part and "language_model" not in name and not name.startswith("lm_head")
