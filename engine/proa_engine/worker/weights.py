"""RankWeights: one rank's share of a model's weights, which sleeps move to host memory or drop, and its adapters."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from proa_engine.config import EngineConfig
from proa_engine.layers.lora import LoraMethod, LoraProducts
from proa_engine.memory.fingerprint import digest_of_ranks
from proa_engine.models.config import ModelConfig
from proa_engine.models.digest import WeightsDigest
from proa_engine.models.drafters.load import FoundDrafter, load_drafter
from proa_engine.models.loader import load_model, load_pooling_heads
from proa_engine.step.loras import LoraAdapters
from proa_engine.worker.make_model_runner import LoadedModel, Placement


class RankWeights:
    """Call `load` once, then `sleep` and `wake_up` by turns. Adapters stay loaded meanwhile."""

    def __init__(
        self,
        config: EngineConfig,
        folder: Path,
        model_config: ModelConfig,
        placement: Placement,
        log: Callable[[str], None],
        drafter: FoundDrafter | None,
    ) -> None:
        self.digest = b""  # of what all ranks have loaded; empty without movers, as nothing else asks for it
        self._config = config
        self._folder = folder
        self._model_config = model_config
        self._placement = placement
        self._log = log
        self._drafter = drafter  # None: the model has none
        self._loaded: LoadedModel | None = None  # None before `load`, and while they sleep at level 2
        self._loras: LoraAdapters | None = None  # None without enable_lora

    @property
    def loaded(self) -> LoadedModel:
        assert self._loaded is not None, "the weights are not loaded, or the worker sleeps already"
        return self._loaded

    def load(self) -> LoadedModel:
        """Load the weights. Raises `ValueError` if they have changed since they were loaded before."""
        config, model_config, placement = self._config, self._model_config, self._placement
        if config.lora.enable_lora:
            products = LoraProducts(
                config.lora.max_loras,
                config.lora.max_lora_rank,
                placement.dtype,
                placement.device,
                batch_invariant=config.batch_invariant,
            )
            model_config = replace(model_config, linear_method=LoraMethod(model_config.linear_method, products))
        digest = WeightsDigest() if config.kv_tiers.has_movers else None
        model = load_model(
            self._folder,
            model_config,
            dtype=placement.dtype,
            device=placement.device,
            parallel=placement.parallel,
            load_format=config.load_format,
            seed=config.seed,
            report=self._log,
            digest=digest,
        )
        drafter = load_drafter(
            self._drafter,
            model_config,
            model,
            dtype=placement.dtype,
            device=placement.device,
            parallel=placement.parallel,
            load_format=config.load_format,
            seed=config.seed,
            report=self._log,
            digest=digest,
        )
        if digest is not None:
            self._keep_digest(digest_of_ranks(digest.digest(), placement.parallel, placement.device))
        heads = load_pooling_heads(
            self._folder,
            model_config,
            model,
            device=placement.device,
            load_format=config.load_format,
            seed=config.seed,
        )
        if config.lora.enable_lora and self._loras is None:
            others = model_config.stage.others(len(model_config.layers))
            self._loras = LoraAdapters(products, others, config.downloads)
        elif self._loras is not None:
            self._loras.move_to(products)
        self._loaded = LoadedModel(self._model_config, model, heads, self._loras, drafter)
        return self._loaded

    def sleep(self, level: int) -> None:
        """Move a GPU's weights to host memory at level 1, drop them at level 2."""
        loaded, self._loaded = self.loaded, None
        if level == 1:
            loaded.move_to(torch.device("cpu"))
            self._loaded = loaded

    def wake_up(self) -> None:
        """Undo `sleep`."""
        if self._loaded is None:
            self.load()
        else:
            self._loaded.move_to(self._placement.device)

    def load_lora(self, lora_id: int, path: str) -> str:
        """Read this rank's part of an adapter into host memory, and return the digest of the whole.

        May run on any thread. Raises `LoraNotFound` or `LoraInvalid`.
        """
        assert self._loras is not None, "the core loads no adapters without enable_lora"
        if self._placement.device.type == "cuda":
            torch.cuda.set_device(self._placement.device)  # page-locked memory belongs to a device's context
        return self._loras.load(lora_id, path)

    def unload_lora(self, lora_id: int) -> None:
        """Free an adapter's host memory, if it is loaded. No later step may fill a slot with it."""
        assert self._loras is not None, "the core loads no adapters without enable_lora"
        self._loras.unload(lora_id)

    def _keep_digest(self, digest: bytes) -> None:
        """Keep the digest of the weights that were just loaded. Raises `ValueError` if it is not that of the start, by
        which the host tier's file, the disk and other engines know this engine's blocks."""
        if self.digest not in (b"", digest):
            raise ValueError(
                f"the weights in {self._folder} have changed since the engine started, and blocks of its KV cache are "
                "kept and exchanged as those of the weights at the start: restart the engine"
            )
        self.digest = digest
