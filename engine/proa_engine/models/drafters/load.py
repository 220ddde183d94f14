"""Find and load the drafter of a model."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from proa_engine.config import EngineConfig, LoadFormat
from proa_engine.json_configs import SpeculativeConfig
from proa_engine.layers.parallel import LayerContext, ParallelContext
from proa_engine.layers.rotary import RotaryTables
from proa_engine.layers.weights import Weights
from proa_engine.models.base import CausalLM
from proa_engine.models.config import ModelConfig
from proa_engine.models.decoder import DecoderForCausalLM
from proa_engine.models.digest import WeightsDigest
from proa_engine.models.drafters.base import LIBRARY_TYPE, BlockDrafter, DrafterOptions, HiddenDrafter, NoDrafter
from proa_engine.models.drafters.block import read_block
from proa_engine.models.drafters.eagle3 import read_eagle3
from proa_engine.models.drafters.mtp import read_library_mtp, read_mtp
from proa_engine.models.weight_sources import CheckpointWeights, RandomWeights, tensor_names
from proa_engine.sources.folders import missing_field, read_config
from proa_engine.sources.resolve import resolve_drafter


@dataclass(frozen=True, slots=True)
class FoundDrafter:
    """A drafter that fits the model."""

    folder: Path
    options: DrafterOptions


def find_drafter(config: EngineConfig, target: ModelConfig) -> FoundDrafter | None:
    """Find the drafter that `config` names for the model `target`, and read its config.json. None if drafts need none.

    Downloads it if it is on the hub or in an object store. Raises ValueError, naming what is not supported.
    """
    speculative = config.drafter
    if not speculative:
        return None
    folder = resolve_drafter(speculative, config)
    return FoundDrafter(folder, read_drafter(speculative, folder, target))


def read_drafter(config: SpeculativeConfig, folder: Path, target: ModelConfig) -> DrafterOptions:
    """Read the drafter in `folder` for the model `target`. Raises ValueError, naming it, for what is not supported."""
    if target.is_adapted or target.is_encoder:
        raise ValueError(
            f"speculative_config method {config.method} is not supported for {target.architecture}, which transformers "
            "runs"
        )
    if not target.has_lm_head:
        raise ValueError(f"speculative_config method {config.method} needs a model that generates tokens")
    try:
        if config.method == "mtp" and not config.model:
            return read_mtp(target, tensor_names(folder))
        fields = read_config(folder)
        if config.method == "eagle3":
            return read_eagle3(fields, target, config.quantization)
        if config.method != "mtp":
            return read_block(fields, target, config)
        if LIBRARY_TYPE in fields:
            return read_library_mtp(fields, target, config.quantization)
        return read_mtp(target, tensor_names(folder))
    except KeyError as error:
        raise ValueError(
            f"speculative_config model {config.model or folder}: {missing_field(str(error.args[0]))}"
        ) from error
    except ValueError as error:
        raise ValueError(f"speculative_config model {config.model or folder}: {error}") from error


def load_drafter(
    found: FoundDrafter | None,
    target: ModelConfig,
    model: CausalLM,
    *,
    dtype: torch.dtype,
    device: torch.device,
    parallel: ParallelContext,
    load_format: LoadFormat = "auto",
    seed: int = 0,
    report: Callable[[str], None],
    digest: WeightsDigest | None = None,
) -> HiddenDrafter | BlockDrafter | NoDrafter:
    """Build this rank's shard of the drafter of `model`. The other arguments are those of `load_model`."""
    if not found:
        return NoDrafter()
    assert isinstance(model, DecoderForCausalLM), "read_drafter refuses other models"
    options = found.options
    tables = RotaryTables(target.max_position_embeddings, device)
    split = target.expert_split(parallel.world_size)
    context = LayerContext(options.hidden_size, parallel, tables, expert_parallel=bool(split and split.by_expert))
    if load_format == "dummy":
        return options.make(Weights(RandomWeights(seed, dtype, device), options.linear_method), model, context)
    with CheckpointWeights(found.folder, dtype, device, digest) as checkpoint:
        checkpoint.begin(options.is_unread, report)
        drafter = options.make(Weights(checkpoint, options.linear_method), model, context)
        checkpoint.finish()
    return drafter
