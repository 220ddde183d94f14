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
from benchmarks.real_shapes import write_model
from proa.contract import SamplingParams
from proa_engine.config import EngineConfig
from proa_engine.kernels.variants import record
from proa_engine.memory.kv_cache import cache_groups
from proa_engine.models.config import ModelConfig
from proa_engine.step.decode_graphs import Graph, GraphShape
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
    replayed: int = 0  # of both: launched by graphs
    activation_bytes: int = 0  # read and written: of floating-point tensors but for weights and KV cache
    kernels: dict[str, int] = field(default_factory=dict)  # launches by name

    @property
    def num_launches(self) -> int:
        return self.triton + self.torch


class StepCounter:
    """A model's steps, on all of its layers."""

    def __init__(self, model: str, settings: dict[str, Any]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = write_model(model, Path(folder))
            self._worker = _AllLayers(
                EngineConfig.from_options(model=str(path), dtype="bfloat16", max_num_seqs=256, **settings)
            )
            record(self._worker.prepare)  # sets Triton's GPU, too

    def count(self, workload: str) -> StepCost:
        step = Step.of_workload(workload, CONTEXT)
        runner = self._worker.model_runner
        length = step.context or step.new_tokens
        requests = prefill_step([length] * step.sequences, self._worker.groups, _SAMPLING)
        names = list(requests.num_scheduled_tokens)
        last = requests
        if step.context:
            runner.prepare_inputs(requests)
            last = decode_step(names, step.context)
        inputs = runner.prepare_inputs(last)
        assert inputs is not None
        with _counting(self._worker.fixed_memory()) as cost:
            self._worker.captured.cost = cost
            runner.execute_model(inputs)
            runner.sample_tokens()
        runner.prepare_inputs(finish_step(names))
        return cost


class _AllLayers(MetaWorker):
    """A MetaWorker with all layers of its model, whose graphs run the captured work when they are replayed."""

    def prepare(self) -> None:
        """Do what the start does, but for the warm-up."""
        self.init_device()
        steps = [Step.of_workload(workload, CONTEXT) for workload in WORKLOADS]
        shapes = [GraphShape(step.rows, 1) for step in steps if step.context]
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
        tensors = [*self.weights.loaded.model.parameters(), *caches]
        return {tensor.untyped_storage()._cdata for tensor in tensors}


class _RunAgain:
    """Captures graphs that run their function again, and counts what it launches by `cost`, if that is set."""

    def __init__(self) -> None:
        self.cost: StepCost | None = None

    def capture(self, first: Callable[[], Tensor], *others: Callable[[Tensor], Tensor]) -> list[Graph]:
        graphs = [self._capture(first)]
        for work in others:
            graphs.append(self._capture(partial(work, graphs[-1].result)))
        return graphs

    def _capture(self, work: Callable[[], Tensor]) -> Graph:
        def replay() -> None:
            assert self.cost is not None
            before = self.cost.num_launches
            work()
            self.cost.replayed += self.cost.num_launches - before

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
