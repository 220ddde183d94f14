"""Load a model by name: find its folder and build the architecture with its weights."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import torch

from proa_engine.builtin import builtin_adapter_folder, builtin_model_folder
from proa_engine.core.lora_store import LoraNotFound
from proa_engine.layers.parallel import ParallelContext
from proa_engine.layers.weights import Weights, WeightSource
from proa_engine.models.base import CausalLM, Classifier
from proa_engine.models.checkpoint import RandomWeights, SafetensorsCheckpoint
from proa_engine.models.config import ModelConfig
from proa_engine.models.lora_checkpoint import CONFIG_FILE, WEIGHTS_FILE
from proa_engine.models.pooling_heads import PoolingHeads, load_heads
from proa_engine.models.registry import model_class

LoadFormat = Literal["auto", "dummy"]

CONFIG_FILES = ["*.json", "*.jinja", "*.model", "*.txt"]
WEIGHT_FILES = ["*.safetensors"]
LORA_FILES = [CONFIG_FILE, WEIGHTS_FILE]
BUILTIN_LORA = "builtin:"


def resolve_model(model: str, revision: str | None = None, load_format: LoadFormat = "auto") -> Path:
    """Return the folder of `model`: "builtin", a folder's path, or a Hugging Face hub id, which is downloaded.

    If `load_format` is "dummy", weights are not downloaded. Raises ValueError with a message for the user.
    """
    if model == "builtin":
        return builtin_model_folder()
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    if model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise ValueError(f"model folder {model} does not exist")
    return _download(model, revision, CONFIG_FILES if load_format == "dummy" else CONFIG_FILES + WEIGHT_FILES)


def resolve_lora(path: str) -> Path:
    """Return the folder of an adapter: "builtin:NAME" for one of the built-in model, a folder's path, or a Hugging Face
    hub id, which is downloaded.

    Raises LoraNotFound with a message for the user.
    """
    try:
        folder = Path(path).expanduser()
        if path.startswith(BUILTIN_LORA):
            folder = builtin_adapter_folder(path.removeprefix(BUILTIN_LORA))
        if folder.is_dir():
            return folder
        if path.count("/") == 1 and not path.startswith((BUILTIN_LORA, ".", "/", "~")):
            return _download(path, None, LORA_FILES)
    except (ValueError, RuntimeError, OSError) as error:  # also of a path that is too long, or in no user's home
        raise LoraNotFound(str(error)) from error
    raise LoraNotFound(f"there is no adapter at {path}")


def _download(model: str, revision: str | None, patterns: list[str]) -> Path:
    import httpx
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=patterns))
    except HFValidationError as error:
        raise ValueError(f"{model} is neither a folder nor a hub id: {error}") from error
    except (LocalEntryNotFoundError, HfHubHTTPError, httpx.HTTPError, OSError) as error:
        raise ValueError(
            f"{model} is not a folder here and could not be downloaded from the hub ({error}); "
            "give a folder, or check the id, the network and HF_TOKEN"
        ) from error


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
) -> CausalLM:
    """Build this rank's shard of the model, ready to run.

    `seed` is that of dummy weights, which are the same for any number of ranks on the same kind of device. Raises
    ValueError or FileNotFoundError if the weights do not fit `config`.
    """
    build = model_class(config.architecture)
    if load_format == "dummy":
        report("making random weights")
        return build(config, Weights(RandomWeights(seed, dtype, device), config.linear_method), parallel)
    started = time.monotonic()
    checkpoint = SafetensorsCheckpoint(folder, dtype, device, report)
    model = build(config, Weights(checkpoint, config.linear_method), parallel)
    checkpoint.finish(lambda name: _is_redundant(name, config))
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
    """Load what follows the pooling of `model`. Raises ValueError or FileNotFoundError as `load_model` does."""

    def make_source(of: Path) -> WeightSource:
        if load_format == "dummy":
            return RandomWeights(seed, torch.float32, device)
        return SafetensorsCheckpoint(of, torch.float32, device, lambda _: None)

    classify = model.classify if isinstance(model, Classifier) else None
    return load_heads(folder, config.pooling, config.hidden_size, make_source, classify)


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
