"""Every launch uses the variant that Triton would use, whatever was launched before. Without a GPU: the driver and the
compiled variants are fakes, and Triton's own binder says which variant an argument list needs."""

import random
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import create_function_from_signature

import proa_engine.kernels
from proa_engine.kernels import launch, tensor_map
from proa_engine.kernels.attention.prefill_hopper import _map_of
from proa_engine.kernels.launch import Kernel
from proa_engine.kernels.tensor_map import Memory, TensorMap

TYPES = (torch.bfloat16, torch.float16, torch.float32, torch.int32, torch.int64, torch.uint8, torch.float8_e4m3fn)
OFFSETS = (0, 16, 32, 8, 24)  # bytes
INTEGERS = [1, 2, 8, 15, 16, 17, 48, 1 << 20, 1 << 40]
INTEGERS += [edge + step for edge in (0, 1 << 31, -(1 << 31), 1 << 63) for step in (-17, -16, -1, 0, 1, 16)]
FLOATS = [0.0, 1.0, 16.0, -0.0, 1e-6, 1e300, float("inf")]
CONSTANTS = (0, 1, 2, 16, None, 0.5)
BUFFER = torch.zeros(256, dtype=torch.uint8)
MAPS = [
    _map_of(Memory(address, dtype), 64, 128, block_size)
    for address in (0, 1024, 4096)
    for dtype in (torch.bfloat16, torch.float16)
    for block_size in (16, 32)
]


class FakeGpu:
    def __init__(self) -> None:
        self.device, self.stream, self.capability = 0, 0, 90

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return 100 * device + self.stream

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)


class FakeLauncher:
    """As Triton's, it has a wrapper of the function that launches."""

    def __init__(self, launcher: Callable[..., None]) -> None:
        def launch(*given: Any) -> None:
            assert not any(map(is_descriptor, given))
            launcher(*given)

        self.launch = launch

    def __call__(self, *given: Any) -> None:
        self.launch(*given)


def is_descriptor(argument: Any) -> bool:
    return hasattr(argument, "block_shape")


class FakeTriton:
    """Stands in for a kernel's `triton.jit` function: runs nothing, and notes which variants are launched."""

    def __init__(self, jit: Any, gpu: FakeGpu) -> None:
        self._bind = create_function_from_signature(jit.signature, jit.params, make_backend(gpu.get_current_target()))
        self._gpu = gpu
        self.is_recording = False
        self.by_triton: list[str] = []
        self.direct: list[tuple[str, tuple[Any, ...]]] = []  # with the arguments of the C launcher

    def variant(self, *arguments: Any, **constants: Any) -> str:
        """What Triton compiles for: all that it specializes on."""
        _, specialization, options = self._bind(*arguments, **constants)
        return f"{self._gpu.device} {specialization} {sorted(options.items())}"

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        def run(*arguments: Any, **constants: Any) -> Any:
            variant = self.variant(*arguments, **constants)
            self.by_triton.append(variant)

            def launcher(*given: Any) -> None:
                self.direct.append((variant, given))

            metadata = SimpleNamespace(tensordesc_meta=[None] * sum(map(is_descriptor, arguments)))
            names = {"function": "f", "packed_metadata": "m", "metadata": metadata}
            return None if self.is_recording else SimpleNamespace(run=FakeLauncher(launcher), **names)

        return run


def every_kind(a_ptr, b_ptr, c_ptr, n, m, k, x, BLOCK: tl.constexpr, HAS_B: tl.constexpr):  # type: ignore[no-untyped-def]
    """A kernel with arguments of each kind."""


def make_kernel() -> Kernel:
    return Kernel(every_kind, do_not_specialize=["m", "b_ptr"], do_not_specialize_on_alignment=["c_ptr", "k"])


def all_kernels() -> dict[str, Kernel]:
    folder = Path(proa_engine.kernels.__path__[0])
    modules = [import_module(f"proa_engine.kernels.{path.stem}") for path in sorted(folder.glob("*.py"))]
    return {name: value for module in modules for name, value in vars(module).items() if isinstance(value, Kernel)}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    gpu = FakeGpu()
    monkeypatch.setattr(launch, "driver", SimpleNamespace(active=gpu))
    monkeypatch.setattr(tensor_map, "make_tensordesc_arg", lambda descriptor, _: ["map", *descriptor.shape])
    return gpu


def tensor(dtype: torch.dtype = torch.float32, offset: int = 0) -> torch.Tensor:
    return BUFFER[offset : offset + 64].view(dtype)


def random_argument(draw: random.Random, name: str) -> Any:
    if name.endswith("_map"):
        return draw.choice(MAPS)
    if name.endswith("_ptr"):
        return None if draw.random() < 0.2 else tensor(draw.choice(TYPES[:3]), draw.choice(OFFSETS))
    return draw.choice(FLOATS) if draw.random() < 0.2 else draw.choice(INTEGERS)


def for_triton(argument: Any) -> Any:
    return argument.descriptor if isinstance(argument, TensorMap) else argument


def for_launcher(argument: Any) -> list[Any]:
    if isinstance(argument, TensorMap):
        return ["map", *argument.descriptor.shape]
    return [argument.data_ptr() if isinstance(argument, torch.Tensor) else argument]


@pytest.mark.parametrize("name", ["every_kind", *all_kernels()])
def test_no_sequence_of_launches_reaches_a_variant_that_does_not_fit(
    name: str, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = make_kernel() if name == "every_kind" else all_kernels()[name]
    all_params = kernel.jit.params
    arguments = [param.name for param in all_params if not param.is_constexpr]
    constants = [param.name for param in all_params if param.is_constexpr and param.name != "PDL"]
    added = {"PDL": True, "launch_pdl": True} if "PDL" in kernel.jit.arg_names else {}
    fake = FakeTriton(kernel.jit, gpu)
    monkeypatch.setattr(kernel, "jit", fake)
    monkeypatch.setattr(kernel, "_variants", {})
    draw = random.Random(name)
    given = [random_argument(draw, argument) for argument in arguments]
    chosen: dict[str, Any] = dict.fromkeys(constants, 16) | {"num_warps": 4}
    for _ in range(1000):
        # One change at a time, often back to what was launched before.
        change = draw.randrange(len(given) + len(chosen))
        if change < len(given):
            given[change] = random_argument(draw, arguments[change])
        else:
            chosen[draw.choice(list(chosen))] = draw.choice(CONSTANTS)
            if draw.random() < 0.5:
                chosen = dict(draw.sample(list(chosen.items()), len(chosen)))
        gpu.device, gpu.stream = draw.choice((0, 0, 0, 1)), draw.randrange(3)
        num_direct = len(fake.direct)
        kernel[3, 2](*given, **chosen)
        if len(fake.direct) > num_direct:
            used, called_with = fake.direct[-1]
            assert used == fake.variant(*map(for_triton, given), **chosen, **added)
            values = [each for value in given for each in for_launcher(value)]
            ignored = [None] * (len(all_params) - len(arguments))
            stream = 100 * gpu.device + gpu.stream
            assert called_with == (3, 2, 1, stream, "f", "m", None, None, None, *values, *ignored)
        else:
            assert fake.by_triton[-1] == fake.variant(*map(for_triton, given), **chosen, **added)
    assert len(fake.direct) > 30


def launches(kernel: Kernel, fake: FakeTriton, *arguments: Any, **constants: Any) -> tuple[int, int]:
    """Launch, and count all launches so far: by Triton, and direct ones."""
    kernel[1,](*arguments, **{"BLOCK": 16, "HAS_B": True, "num_warps": 4} | constants)
    return len(fake.by_triton), len(fake.direct)


@pytest.fixture
def faked(gpu: FakeGpu) -> tuple[Kernel, FakeTriton]:
    kernel = make_kernel()
    kernel.jit = FakeTriton(kernel.jit, gpu)
    return kernel, kernel.jit


def test_a_second_launch_is_direct_and_what_is_not_specialized_may_change(faked: tuple[Kernel, FakeTriton]) -> None:
    first = tensor(), tensor(), tensor(), 1024, 16, 32, 0.5
    assert launches(*faked, *first) == (1, 0)
    assert launches(*faked, *first) == (1, 1)
    assert launches(*faked, tensor(offset=32), tensor(offset=8), tensor(offset=24), 1024, 1, 32, 0.25) == (1, 2)


@pytest.mark.parametrize(
    "changed",
    [
        {0: tensor(torch.bfloat16)},
        {0: tensor(torch.int32)},
        {0: tensor(offset=8)},
        {0: None},
        {1: None},
        {2: tensor(torch.float16)},
        {3: 1},
        {3: 1023},
        {3: 1 << 40},
        {4: 1 << 31},
        {5: 1},
        {5: 1 << 31},
        {6: 1},
    ],
)
def test_another_variant_is_found_by_triton_and_the_first_is_kept(
    changed: dict[int, Any], faked: tuple[Kernel, FakeTriton]
) -> None:
    first = [tensor(), tensor(), tensor(), 1024, 16, 32, 0.5]
    other = [changed.get(place, argument) for place, argument in enumerate(first)]
    launches(*faked, *first)
    assert launches(*faked, *other) == (2, 0)
    assert launches(*faked, *first) == (2, 1)
    assert launches(*faked, *other) == (2, 2)
    _, fake = faked
    assert [variant for variant, _ in fake.direct] == fake.by_triton


@pytest.mark.parametrize("changed", [{"BLOCK": 32}, {"HAS_B": False}, {"num_warps": 8}, {"num_stages": 3}])
def test_other_constants_and_options_are_another_variant(
    changed: dict[str, Any], faked: tuple[Kernel, FakeTriton]
) -> None:
    arguments = tensor(), tensor(), tensor(), 1024, 16, 32, 0.5
    launches(*faked, *arguments)
    assert launches(*faked, *arguments, **changed) == (2, 0)
    assert launches(*faked, *arguments, **changed) == (2, 1)


def test_constants_are_told_apart_by_name(faked: tuple[Kernel, FakeTriton]) -> None:
    kernel, fake = faked
    arguments = tensor(), tensor(), tensor(), 1024, 16, 32, 0.5
    kernel[1,](*arguments, BLOCK=16, HAS_B=2, num_warps=4)
    kernel[1,](*arguments, HAS_B=16, BLOCK=2, num_warps=4)
    assert len(fake.by_triton) == 2
    assert not fake.direct


@pytest.mark.parametrize("unusual", [True, (16, 1)])
def test_arguments_of_other_types_are_always_left_to_triton(unusual: Any, faked: tuple[Kernel, FakeTriton]) -> None:
    arguments = tensor(), tensor(), tensor(), 1024, 16, 32, unusual
    launches(*faked, *arguments)
    assert launches(*faked, *arguments) == (2, 0)


def test_tensors_of_other_classes_are_always_left_to_triton(faked: tuple[Kernel, FakeTriton]) -> None:
    arguments = torch.nn.Parameter(torch.zeros(4)), tensor(), tensor(), 1024, 16, 32, 0.5
    launches(*faked, *arguments)
    assert launches(*faked, *arguments) == (2, 0)


def test_a_recorded_launch_is_not_a_launch(faked: tuple[Kernel, FakeTriton]) -> None:
    kernel, fake = faked
    arguments = tensor(), tensor(), tensor(), 1024, 16, 32, 0.5
    fake.is_recording = True
    launches(kernel, fake, *arguments)
    fake.is_recording = False
    assert launches(kernel, fake, *arguments) == (2, 0)
    assert launches(kernel, fake, *arguments) == (2, 1)


def test_arguments_must_be_complete(faked: tuple[Kernel, FakeTriton]) -> None:
    with pytest.raises(ValueError, match="longer"):
        launches(*faked, tensor(), tensor())


def test_dependent_launches_begin_with_hopper(gpu: FakeGpu) -> None:
    gpu.capability = 90
    assert launch.dependent_launch() == {"PDL": True, "launch_pdl": True}
    gpu.capability = 89
    assert launch.dependent_launch() == {"PDL": False}
