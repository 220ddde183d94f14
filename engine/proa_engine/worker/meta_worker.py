"""MetaWorker: a worker without weights and without a device, to see which kernels one with them will launch.

All of its tensors are meta tensors: steps run through the same code, whose launches can be noted, and anything that
waited for the device would fail.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store

from proa_engine.config import EngineConfig
from proa_engine.layers.parallel import ParallelContext
from proa_engine.models.config import ModelConfig
from proa_engine.worker.decode_graphs import Recorder
from proa_engine.worker.distributed import Rendezvous
from proa_engine.worker.worker import Worker

_NUM_BLOCKS = 1 << 20  # meta tensors take no memory


class MetaWorker(Worker):
    """Any rank of a GPU engine with this configuration; all launch the same kernels."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(replace(config, load_format="dummy", num_gpu_blocks_override=_NUM_BLOCKS), 0, _say_nothing)
        self._parallel = MetaParallel(0, config.tensor_parallel_size, None)

    def rehearse(self) -> None:
        """All that a worker does until requests come."""
        self.init_device()
        self.start(self.load_model().num_blocks)

    def init_device(self, rendezvous: Rendezvous | None = None, store: Store | None = None) -> None:
        super().init_device(rendezvous, store)
        self.model_config = one_of_each_kind(self.model_config)

    def _choose_device(self) -> torch.device:
        return torch.device("meta")

    def _graph_sizes(self) -> list[int]:
        return super()._graph_sizes()[:1]  # the same kernels for each

    def _recorder(self) -> Recorder:
        return _Once()


def one_of_each_kind(config: ModelConfig) -> ModelConfig:
    """The model with as few layers as launch all of its kernels."""
    experts = () if config.moe is None else config.moe.layers
    # The first has no residual to add.
    kinds = {(layer == 0, window, layer in experts): layer for layer, window in enumerate(config.layer_windows)}
    kept = sorted(kinds.values())
    moe = config.moe
    if moe is not None:
        moe = replace(moe, layers=type(moe.layers)(new for new, old in enumerate(kept) if old in experts))
    windows = tuple(config.layer_windows[layer] for layer in kept)
    return replace(config, num_layers=len(kept), layer_windows=windows, moe=moe)


class MetaParallel(ParallelContext):
    """Ranks that exchange shapes: no other rank exists."""

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def _all_gather(self, x: Tensor) -> list[Tensor]:
        return [x] * self.world_size


class _Once:
    def record(self, work: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        return lambda: None, work()


def _say_nothing(_line: str) -> None:
    pass
