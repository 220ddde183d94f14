"""Time on the host of a mixed step's kernel launches: through Triton's binder, and directly as `Kernel` does.

    PYTHONPATH=tests python -m benchmarks.kernels.kernel_launch

Needs no GPU: the kernels are compiled for Hopper and launched with the step's arguments on meta tensors, but the driver
does nothing, so that neither figure has CUDA's own part of a launch.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import triton

from proa_engine.config import EngineConfig
from proa_engine.kernels.launch import Kernel
from proa_engine.memory.kv_cache import cache_groups
from proa_engine.models.config import ModelConfig
from proa_engine.worker.make_model_runner import make_model_runner
from proa_engine.worker.meta_worker import MetaWorker
from proa_engine.worker.warmup_steps import prefill_step
from proa_engine.worker.worker import Worker
from support import shape_models as models
from support.fake_gpu import FakeGpu, FakeLauncher

LENGTHS = [1] * 32 + [700, 1000]  # decodes, then prompts
NUM_LAYERS = 28
REPEATS = 200

Launch = tuple[Kernel, tuple[int, ...], tuple[Any, ...], dict[str, Any]]


class IdleLauncher(FakeLauncher):
    """Checks nothing, so that a launch takes only the time of what calls it."""

    def __call__(self, *arguments: object) -> None:
        pass


class IdleGpu(FakeGpu):
    launcher_cls = IdleLauncher


class WholeMetaWorker(MetaWorker):
    def _read_model_config(self) -> ModelConfig:
        return Worker._read_model_config(self)  # with all layers


def launches_of_a_step() -> list[Launch]:
    launches: list[Launch] = []

    def note(kernel: Kernel, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        launches.append((kernel, grid, arguments, constants))

    with tempfile.TemporaryDirectory() as folder:
        fields = models.QWEN3_06B | {"num_hidden_layers": NUM_LAYERS}
        model = str(models.make_shape_model(Path(folder), fields))
        worker = WholeMetaWorker(EngineConfig(model=model, dtype="bfloat16"))
        worker.init_device()
        sizes = worker.load_model().cache
        plan = replace(worker._plan_runner(sizes), shapes=(), prompt_shapes=())
        runner = make_model_runner(plan, worker.weights.loaded)
    groups = cache_groups(plan.config, plan.caches, plan.sizes)
    inputs = runner.prepare_inputs(prefill_step(LENGTHS, groups))
    assert inputs is not None
    launch = Kernel._launch
    Kernel._launch = note  # type: ignore[assignment, method-assign]
    runner.execute_model(inputs)
    Kernel._launch = launch  # type: ignore[method-assign]
    return launches


def best_seconds(work: Callable[[], None]) -> float:
    seconds = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    triton.runtime.driver.set_active(IdleGpu())
    launches = launches_of_a_step()

    def through_triton() -> None:
        for kernel, grid, arguments, constants in launches:
            kernel._launch_by_triton(grid, *arguments, **constants)

    def directly() -> None:
        for kernel, grid, arguments, constants in launches:
            kernel[grid](*arguments, **constants)

    for work in (through_triton, directly):
        work()  # compiles
        seconds = best_seconds(work)
        name, count = work.__name__.replace("_", " "), len(launches)
        print(f"{name}: {count} launches in {1e3 * seconds:.2f} ms, {1e6 * seconds / count:.1f} us each")


if __name__ == "__main__":
    main()
