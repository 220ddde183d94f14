"""Cases of kernels: what is computed, against what it is compared, and in which shapes.

Each module of `ROOMS` in this package has cases of the kernels of a room, as values and functions of the module:
`KernelCase`, an operation with its reference, and functions with `@holds`, for whatever else must hold. Two runners
find them by these names: `support.interpreter`, with CPU tensors in Triton's interpreter, and
`tests/gpu/test_gpu_kernels.py`.
"""

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields, is_dataclass, replace
from importlib import import_module
from types import ModuleType
from typing import Any
from unittest import mock

import torch

from proa_engine.kernels.tilings import TILINGS
from support.thorough import THOROUGH, combinations

QUICK_ROOMS = (
    "attention",
    "caches",
    "decodes",
    "drafts",
    "latent",
    "norms",
    "products",
    "quantized",
    "routers",
    "sampling",
    "states",
)
SLOW_ROOMS = ("experts", "few_experts")  # in the interpreter
ROOMS = (*QUICK_ROOMS, *SLOW_ROOMS)

INTERPRETED_DTYPES = (torch.float32, torch.float16) if THOROUGH else (torch.float32,)  # it computes bfloat16 wrongly
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
WITHOUT_DTYPE = (torch.bfloat16,)  # of what does not depend on the type of floats: run once
ON_CPU = {torch.float32: 2e-5, torch.float16: 4e-3}
ON_GPU = {torch.float32: 3e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}

Shape = Mapping[str, Any]  # arguments by name: numbers, names, sequences of them, but no tensors


def grid(shapes: Sequence[Shape] = ({},), **values: Collection[Any]) -> list[Shape]:
    """Each of the shapes with all combinations of the values."""
    others = [dict(zip(values, each, strict=True)) for each in itertools.product(*values.values())]
    return [{**shape, **other} for shape in shapes for other in others]


def turns(**values: Sequence[Any]) -> list[Shape]:
    """The values of the first name, the longest, with the combinations of the others in turn, in fewer cases than
    `grid`, which it is if tests are thorough."""
    return [dict(zip(values, each, strict=True)) for each in combinations(*values.values())]


def table(names: str, *rows: Sequence[Any]) -> list[Shape]:
    """One shape a row; `names` apart by spaces."""
    return [dict(zip(names.split(), row, strict=True)) for row in rows]


@dataclass(frozen=True, kw_only=True)
class Case:
    interpreted: Sequence[Shape] = ()
    gpu: Sequence[Shape] = ()
    dtypes: Sequence[torch.dtype] = FLOATS  # on a GPU

    def run(self, dtype: torch.dtype, device: str, shape: Shape) -> None:
        raise NotImplementedError

    def check(self, dtype: torch.dtype, device: str, shape: Shape) -> None:
        """Run one shape, with what kernels allocate filled with NaN, so that an element that one never wrote, or read
        too early, shows."""
        torch.manual_seed(0)
        with poisoned_memory():
            self.run(dtype, device, shape)


@dataclass(frozen=True, kw_only=True)
class KernelCase(Case):
    """`make` returns the arguments of `operation` and of `reference` for a dtype and a shape, on the CPU. Both get
    copies, which they may write to; the operation's are on the device, the reference's on the CPU. What they return is
    compared."""

    make: Callable[..., tuple[Any, ...]]
    operation: Callable[..., Any]
    reference: Callable[..., Any]
    compare: Callable[[Any, Any], None] | None = None  # None: `close`

    def run(self, dtype: torch.dtype, device: str, shape: Shape) -> None:
        arguments = self.make(dtype=dtype, **shape)
        expected = self.reference(*on_device(arguments, "cpu"))
        (self.compare or close)(self.operation(*on_device(arguments, device)), expected)


@dataclass(frozen=True, kw_only=True)
class Property(Case):
    """`hold` asserts, of a dtype and a shape by name, on `device`."""

    hold: Callable[..., None]

    def run(self, dtype: torch.dtype, device: str, shape: Shape) -> None:
        self.hold(dtype, device, **shape)


def holds(
    *, interpreted: Sequence[Shape] = (), gpu: Sequence[Shape] = (), dtypes: Sequence[torch.dtype] = FLOATS
) -> Callable[[Callable[..., None]], Property]:
    """Decorate the function of a `Property`. [{}]: it has one shape, without a name."""
    return lambda hold: Property(hold=hold, interpreted=interpreted, gpu=gpu, dtypes=dtypes)


def cases_of(room: str) -> dict[str, Case]:
    """By name, such as `norms.rms_norm`."""
    module = import_module(f"support.kernels.{room}")
    return {f"{room}.{name.lower()}": case for name, case in vars(module).items() if isinstance(case, Case)}


@contextmanager
def poisoned_memory() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def patched_tiles(module: ModuleType, capability: int | None) -> AbstractContextManager[Any]:
    """Let the kernels of a module take the tiles of such GPUs, which the interpreter would not. None: its own."""
    if capability is None:
        return nullcontext()
    return mock.patch.object(module, "tilings_of", return_value=TILINGS[capability])


def on_device(value: Any, device: str, copies: dict[int, torch.Tensor] | None = None) -> Any:
    """A copy of a tensor, or of a sequence or dataclass with its tensors, on the device. Views stay views, with their
    strides, of a copy of their memory."""
    copies = {} if copies is None else copies
    if isinstance(value, torch.Tensor):
        memory = value.untyped_storage()
        if memory.data_ptr() not in copies:
            whole = torch.empty(0, dtype=torch.uint8, device=value.device).set_(memory)
            copies[memory.data_ptr()] = whole.to(device, copy=True)
        copy = copies[memory.data_ptr()].view(value.dtype)
        return copy.as_strided(value.shape, value.stride(), value.storage_offset())
    if isinstance(value, list | tuple):
        return type(value)(on_device(each, device, copies) for each in value)
    if is_dataclass(value) and not isinstance(value, type):
        parts = {each.name: on_device(getattr(value, each.name), device, copies) for each in fields(value)}
        is_plain = all(part is getattr(value, name) for name, part in parts.items())
        return value if is_plain else replace(value, **parts)
    return value


def pairs_of(ours: Any, theirs: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The tensors of two results, side by side. Theirs may be in more digits."""
    if isinstance(ours, torch.Tensor):
        assert theirs.dtype in (ours.dtype, torch.float32, torch.float64), f"{ours.dtype}, not {theirs.dtype}"
        yield ours, theirs
        return
    for each in zip(ours, theirs, strict=True):
        yield from pairs_of(*each)


def close(ours: Any, theirs: Any, times: float = 1.0) -> None:
    """Assert that all elements of two results agree within so many times the tolerance of our type on our device,
    absolute and relative."""
    for our, their in pairs_of(ours, theirs):
        tolerance = times * (ON_GPU if our.is_cuda else ON_CPU)[our.dtype]
        torch.testing.assert_close(our.float().cpu(), their.float().cpu(), atol=tolerance, rtol=tolerance)


def equal(ours: Any, theirs: Any) -> None:
    for our, their in pairs_of(ours, theirs):
        assert torch.equal(our.cpu(), their.cpu())


def near(ours: Any, theirs: Any, share: float = 0.01) -> None:
    """Compare mean errors: single values may differ where a number lies midway between two of 8 bits. Zeros, of tokens
    whose experts another rank holds, must be equal."""
    for our, their in pairs_of(ours, theirs):
        our, their = our.float().cpu(), their.float().cpu()
        assert our.isfinite().all()
        error, size = (our - their).abs().mean(), their.abs().mean()
        assert error <= share * size, f"mean error {error} of {size}"
