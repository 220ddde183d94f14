"""Kernels that a step launches and the bytes that they move, counted on meta tensors: no GPU, no weights."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.jit import JITFunction

from benchmarks.engine.floors import Step
from benchmarks.real_shapes import write_drafter, write_model
from proa.contract import SamplingParams
from proa_engine.config import EngineConfig
from proa_engine.core.grammar import GrammarMasks
from proa_engine.json_configs import SpeculativeConfig
from proa_engine.kernels.variants import record
from proa_engine.memory.kv_cache import cache_groups
from proa_engine.models.config import ModelConfig
from proa_engine.step.decode_graphs import Graph, graph_shapes
from proa_engine.worker.make_model_runner import make_model_runner
from proa_engine.worker.meta_worker import MetaWorker
from proa_engine.worker.warmup_steps import decode_step, finish_step, prefill_step
from proa_engine.worker.worker import Worker

CONTEXT = 512  # tokens before a decode
WORKLOADS = ("decode-1", "decode-8", "decode-64", "decode-256", "prefill-1x1024")
_SAMPLING = SamplingParams(temperature=0.6)
# Operators that launch nothing: they allocate, or rename memory
_NO_LAUNCH = ("aten.empty", "aten.new_empty", "aten._unsafe_view", "aten.detach", "aten.lift", "aten.set_")


@dataclass(slots=True)
class StepCost:
    triton: int = 0  # launches of Triton's kernels
    torch: int = 0  # operators of torch that launch a kernel or a copy: at least as many launches
    # Of both: by the graph of the layers, which begins with proposals of draft tokens, and by the one behind it, of
    # logits and samples, or of a drafter's entries
    replayed: list[int] = field(default_factory=lambda: [0, 0])
    activation_bytes: int = 0  # read and written: of floating-point tensors but for weights and KV cache
    kernels: dict[str, int] = field(default_factory=dict)  # launches by name

    @property
    def num_launches(self) -> int:
        return self.triton + self.torch

    @property
    def outside_graphs(self) -> int:
        return self.num_launches - sum(self.replayed)


@dataclass(frozen=True, slots=True)
class StaticEngine:
    shape: str  # of `SHAPES`
    quantization: str | None = None  # of an unquantized checkpoint, at its start
    drafts: SpeculativeConfig | None = None  # its model: of `DRAFTERS`

    @property
    def has_fp8(self) -> bool:
        """Whether the layers' matrices have 8 bits, and the shape's 16."""
        return self.quantization == "fp8"

    @property
    def num_drafts(self) -> int:
        return self.drafts.max_drafts if self.drafts else 0


class StepCounter:
    """An engine's steps, on all layers of its model."""

    def __init__(self, engine: StaticEngine) -> None:
        self._num_drafts = engine.num_drafts
        with tempfile.TemporaryDirectory() as folder:
            drafts = engine.drafts
            if drafts and drafts.model:
                drafts = replace(drafts, model=str(write_drafter(drafts.model, Path(folder, "drafter"))))
            config = EngineConfig.from_options(
                model=str(write_model(engine.shape, Path(folder))),
                quantization=engine.quantization,
                speculative_config=drafts,
                dtype="bfloat16",
                max_num_seqs=256,
            )
            self._worker = _AllLayers(config)
            record(self._worker.prepare)  # sets Triton's GPU, too

    @property
    def vocab_size(self) -> int:
        return self._worker.model_config.vocab_size

    def count(
        self,
        workload: str,
        num_drafts: int = 0,
        sampling: SamplingParams = _SAMPLING,
        masks: GrammarMasks | None = None,
    ) -> StepCost:
        """`num_drafts`: draft tokens of each request in a step of decodes, 0 or the engine's. `masks`: of grammars."""
        assert num_drafts in (0, self._num_drafts), "graphs have these widths"
        step = Step.of_workload(workload, CONTEXT)
        runner = self._worker.model_runner
        length = step.context or step.new_tokens
        requests = prefill_step([length] * step.sequences, self._worker.groups, sampling)
        names = list(requests.num_scheduled_tokens)
        last = requests
        if step.context:
            runner.prepare_inputs(requests)
            last = decode_step(names, step.context, 1 + num_drafts)
        last.grammar_rows = [] if masks is None else list(masks.rows)
        inputs = runner.prepare_inputs(last)
        assert inputs is not None
        with _counting(self._worker.fixed_memory()) as cost:
            self._worker.captured.cost = cost
            runner.execute_model(inputs)
            runner.sample_tokens(masks)
        runner.prepare_inputs(finish_step(names))
        return cost


class _AllLayers(MetaWorker):
    """A MetaWorker with all layers of its model, whose graphs run the captured work when they are replayed."""

    def prepare(self) -> None:
        """Do what the start does, but for the warm-up."""
        self.init_device()
        steps = [Step.of_workload(workload, CONTEXT) for workload in WORKLOADS]
        shapes = [
            shape
            for shape in graph_shapes(self._config.max_num_seqs, self._config.num_speculative_tokens)
            if shape.num_rows in [step.rows for step in steps if step.context]
        ]
        sizes = self.load_model().cache
        plan = replace(self._plan_runner(sizes), shapes=shapes, prompt_shapes=())
        self.groups = cache_groups(plan.config, plan.caches, plan.sizes)
        self.model_runner = make_model_runner(plan, self.weights.loaded)
        self.captured = _RunAgain()
        self.model_runner.capture_graphs(self.captured)

    def _read_model_config(self) -> ModelConfig:
        return Worker._read_model_config(self)  # not MetaWorker's, which keeps one layer of each kind

    def fixed_memory(self) -> set[int]:
        """Storages of the weights and the KV cache."""
        caches = [tensor for cache in self.model_runner.caches for tensor in cache.tensors]
        tensors = [*self.weights.loaded.parameters(), *caches]
        return {tensor.untyped_storage()._cdata for tensor in tensors}


class _RunAgain:
    """Captures graphs that run their function again, and counts what it launches by `cost`, if that is set."""

    def __init__(self) -> None:
        self.cost: StepCost | None = None

    def capture(self, first: Callable[[], Tensor], *others: Callable[[Tensor], Tensor]) -> list[Graph]:
        graphs = [self._capture(first, 0)]
        for number, work in enumerate(others, start=1):
            graphs.append(self._capture(partial(work, graphs[-1].result), number))
        return graphs

    def _capture(self, work: Callable[[], Tensor], number: int) -> Graph:
        def replay() -> None:
            assert self.cost is not None
            before = self.cost.num_launches
            work()
            self.cost.replayed[number] += self.cost.num_launches - before

        return Graph(replay, work())


@contextmanager
def _counting(fixed: set[int]) -> Iterator[StepCost]:
    cost = StepCost()

    def launch(kernel: Any, *arguments: Any, **options: Any) -> None:
        cost.triton += 1
        cost.activation_bytes += _bytes(arguments, fixed)
        cost.kernels[kernel.__name__] = cost.kernels.get(kernel.__name__, 0) + 1

    with mock.patch.object(JITFunction, "run", launch), _Operators(cost, fixed):
        yield cost


class _Operators(TorchDispatchMode):
    def __init__(self, cost: StepCost, fixed: set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._cost, self._fixed = cost, fixed

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = str(func)
        tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, Tensor)]
        if func.is_view or name.startswith(_NO_LAUNCH) or not any(tensor.is_meta for tensor in tensors):
            return result
        self._cost.torch += 1
        self._cost.activation_bytes += _bytes(tensors, self._fixed)
        self._cost.kernels[name] = self._cost.kernels.get(name, 0) + 1
        return result


def _bytes(values: Any, fixed: set[int]) -> int:
    """Bytes of the floating-point tensors among the values, each once, without those in fixed memory."""
    tensors = {id(value): value for value in values if isinstance(value, Tensor) and value.is_floating_point()}
    return sum(each.nbytes for each in tensors.values() if each.untyped_storage()._cdata not in fixed)
