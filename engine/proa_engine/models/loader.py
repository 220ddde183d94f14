"""Build a model's architecture with the weights of its folder."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from proa_engine.config import LoadFormat
from proa_engine.layers.parallel import ParallelContext
from proa_engine.layers.weights import Weights, WeightSource
from proa_engine.models.base import CausalLM, Classifier
from proa_engine.models.config import ModelClass, ModelConfig
from proa_engine.models.decoder import text_weights
from proa_engine.models.digest import WeightsDigest
from proa_engine.models.pooling_heads import DenseHead, PoolingHeads, Score, SparseWeights
from proa_engine.models.registry import model_class
from proa_engine.models.unread import why_unread
from proa_engine.models.weight_sources import CheckpointWeights, RandomWeights


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
        source = RandomWeights(seed, dtype, device)
        return build(config, Weights(source, config.linear_method, names=build.names), parallel)
    started = time.monotonic()
    with CheckpointWeights(folder, dtype, device, digest) as checkpoint:
        weights = Weights(checkpoint, config.linear_method, names=build.names)
        text, lm_head = text_weights(weights)
        decoder, layers, head = ((part / "").prefix for part in (text, text / "layers", lm_head))
        checkpoint.begin(
            lambda name: (
                why_unread(name, config, decoder, head) is not None or _is_of_other_stage(name, config, layers)
            ),
            report,
        )
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

    @contextmanager
    def source(of: Path, prefix: str) -> Iterator[WeightSource]:
        """The weights in a folder, of which all whose names begin with `prefix` must be taken."""
        if load_format == "dummy":
            yield RandomWeights(seed, torch.float32, device)
            return
        with CheckpointWeights(of, torch.float32, device) as checkpoint:
            checkpoint.begin(lambda name: not name.startswith(prefix), lambda _: None)
            yield checkpoint
            checkpoint.finish()

    pooling, dense = config.pooling, []
    for each in pooling.dense:
        with source(each.folder, "linear." if each.folder == folder else "") as weights:
            dense.append(DenseHead.load(each, weights))
    if pooling.sparse_files:
        (path,) = pooling.sparse_files
        return PoolingHeads(pooling, dense, SparseWeights.load(path, config.hidden_size, device))
    if isinstance(model, Classifier):
        return PoolingHeads(pooling, dense, model.classify)
    if not pooling.labels:
        return PoolingHeads(pooling, dense)
    with source(folder, "score.") as weights:
        return PoolingHeads(pooling, dense, Score.load(pooling, config.hidden_size, weights))


def _is_of_other_stage(name: str, config: ModelConfig, layers: str) -> bool:
    """Whether another pipeline stage loads a checkpoint's tensor. `layers`: how names of the layers' tensors begin."""
    if not name.startswith(layers):
        return not config.stage.is_first
    return name.removeprefix(layers).partition(".")[0] in config.stage.others(len(config.layers))
