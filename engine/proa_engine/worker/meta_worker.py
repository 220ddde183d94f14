"""MetaWorker: a worker on meta tensors, without weights or a device, to find the kernels that a GPU worker launches.

Its steps run through the same code as a GPU worker's, and anything that synchronizes with the device fails.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store

from proa_engine.config import EngineConfig
from proa_engine.layers.cache_layers import CacheLayer
from proa_engine.layers.parallel import ParallelContext
from proa_engine.models.config import ModelConfig
from proa_engine.models.drafters.load import FoundDrafter
from proa_engine.observability.worker_spans import NoWorkerTracer
from proa_engine.option_groups import KvTiers
from proa_engine.ranks.distributed import Rendezvous
from proa_engine.ranks.stage_links import StageLinks
from proa_engine.step.decode_graphs import Graph, GraphCapture, GraphShape
from proa_engine.step.prompt_graphs import PromptShape
from proa_engine.worker.worker import Worker

_NUM_BLOCKS = 1 << 20  # meta tensors take no memory


def run_starts(config: EngineConfig) -> None:
    """Run the starts, on each pipeline stage, of the first tensor parallel rank, which may have more heads than others
    and adds biases, and of the last, if its matrices have other shapes."""
    size = config.parallel.tensor_parallel_size
    for rank in range(0, config.parallel.num_ranks, size):
        first = MetaWorker(config, rank)
        first.run_start()
        if size == 1:
            continue
        last = MetaWorker(config, rank + size - 1)
        last.init_device()
        sizes = last.load_model()
        if last.matrix_shapes != first.matrix_shapes:
            last.start(sizes.cache)


class MetaWorker(Worker):
    """A rank of a GPU engine with this configuration.

    It starts no threads, not even an exporter of spans, because `compile_kernels` forks. It has no mover, which would
    need the weights' digest and open the engine's files.
    """

    def __init__(self, config: EngineConfig, rank: int = 0) -> None:
        config = replace(
            config,
            load_format="dummy",
            num_gpu_blocks_override=_NUM_BLOCKS,
            kv_tiers=KvTiers(kv_offloading_size=config.kv_tiers.kv_offloading_size),
        )
        super().__init__(config, rank, lambda line: None, tracer=NoWorkerTracer())

    def run_start(self) -> None:
        """Run everything that a worker runs before its first request."""
        self.init_device()
        self.start(self.load_model().cache)

    @property
    def matrix_shapes(self) -> list[torch.Size]:
        """Shapes of the model's parameters, once it is loaded."""
        return [parameter.shape for parameter in self.weights.loaded.model.parameters()]

    def _read_model_config(self) -> ModelConfig:
        return with_one_layer_of_each_kind(super()._read_model_config())

    def _find_drafter(self, model: ModelConfig) -> FoundDrafter | None:
        return super()._find_drafter(super()._read_model_config())  # it may read states behind layers that are left out

    def _join(self, rendezvous: Rendezvous, store: Store | None) -> tuple[ParallelContext, StageLinks]:
        size = self._config.parallel.tensor_parallel_size
        return MetaParallel(self._rank % size, size, None), MetaLinks()

    def _resolve_device(self) -> torch.device:
        return torch.device("meta")

    def _graph_shapes(self, config: EngineConfig) -> list[GraphShape]:
        # One row of each width launches what more rows do.
        return [shape for shape in super()._graph_shapes(config) if shape.num_rows == 1]

    def _prompt_shapes(self, config: EngineConfig) -> list[PromptShape]:
        return super()._prompt_shapes(config)[-2:]  # with decodes and without

    def _graph_capture(self) -> GraphCapture:
        return _RunOnce()


def with_one_layer_of_each_kind(config: ModelConfig) -> ModelConfig:
    """The model with the fewest layers of its pipeline stage that launch all of the stage's kernels."""
    # The first layer is a kind of its own: it adds no residual.
    own = config.own_layers
    kinds = {(number == 0, layer): number for number, layer in enumerate(own)}
    layers = tuple(own[number] for number in sorted(kinds.values()))
    stage = replace(config.stage, first=0, end=None)
    return replace(config, decoder=replace(config.decoder, layers=layers), stage=stage)


class MetaParallel(ParallelContext):
    """Collectives on meta tensors: only shapes matter, and no other rank exists."""

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        return x

    def _all_gather(self, x: Tensor) -> list[Tensor]:
        return [x] * self.world_size


class MetaLinks:
    """Links of a stage on meta tensors: only shapes matter, and no other stage exists."""

    def send(self, x: Tensor) -> None:
        assert x.is_contiguous()

    def receive(self, x: Tensor) -> None:
        assert x.is_contiguous()

    def gather_layers(self, own: Sequence[CacheLayer]) -> tuple[Sequence[CacheLayer], int]:
        return own, 0


class _RunOnce:
    def capture(self, first: Callable[[], Tensor], *others: Callable[[Tensor], Tensor]) -> list[Graph]:
        results = [first()]
        for work in others:
            results.append(work(results[-1]))
        return [Graph(lambda: None, result) for result in results]
