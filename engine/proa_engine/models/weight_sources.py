"""Weight sources: the files of a checkpoint, of which a rank reads its share; and random numbers."""

import hashlib
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Self

import torch

from proa_engine.layers.quantized.ggml_blocks import dequantize
from proa_engine.layers.quantized.ggml_types import BLOCKS
from proa_engine.layers.weights import Slice
from proa_engine.models.digest import WeightsDigest
from proa_engine.models.read_ahead import ReadAhead
from proa_engine.observability.progress import Progress, gigabytes
from proa_engine.sources.folders import read_json, weight_files
from proa_engine.sources.tensors import FLOATS, UNCHANGED, Change, Tensor
from proa_engine.sources.weight_headers import read_header

DUMMY_STD = 0.02
DUMMY_SCALE = 0.005  # scale of dummy quantized weights
DUMMY_EXPONENT = 120  # of dummy mxfp4 weights, biased by 127: random bits then have a deviation of 0.02
_TYPES = {  # of what can be stored
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
}
STORED_AS = {  # all other types: FLOATS and BLOCKS
    torch.float8_e4m3fn: ("F8_E4M3",),
    torch.int8: ("I8",),
    torch.int32: ("I32",),
    torch.int64: ("I64",),
    torch.uint8: ("U8",),
}


class CheckpointWeights:
    """The weight files of a folder, or a GGUF file, as a `WeightSource`. Tracks which tensors were taken."""

    def __init__(
        self, folder: Path, dtype: torch.dtype, device: torch.device, digest: WeightsDigest | None = None
    ) -> None:
        """Use it as a context manager, because threads read the files. What is taken is added to `digest`."""
        self.dtype = dtype
        self.device = device
        self._folder = folder
        self._paths = weight_files(folder)
        self._stored = _read_headers(self._paths)
        self._reader = ReadAhead(self._stored, device, digest)
        self._taken: set[str] = set()
        self._counted: set[str] = set()  # whose bytes are loaded, unlike those of `take_names`
        self._left: set[str] = set()  # prefixes
        self._problems: list[str] = []
        self._ignored: Callable[[str], bool] = lambda _: False
        self._progress: Progress | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._reader.close()

    def begin(self, ignored: Callable[[str], bool], report: Callable[[str], None]) -> None:
        """Report the progress of what follows. `ignored` are the names of tensors that this rank does not need."""
        self._ignored = ignored
        num_bytes = sum(size for name, size in self._sizes.items() if not ignored(name))
        self._progress = Progress(report, "loading weights", num_bytes, "GB", scale=1e9)
        files = f"{len(self._paths)} files" if len(self._paths) > 1 else "1 file"
        report(f"loading {gigabytes(num_bytes)} GB of weights from {files} of {self._folder}")

    def __contains__(self, name: str) -> bool:
        return name in self._stored

    def take_names(self) -> dict[str, tuple[int, ...]]:
        """The full shape of every tensor. All count as taken: the caller names those that it does not use."""
        self._taken.update(self._stored)
        return {name: tensor.shape for name, (_, tensor) in self._stored.items()}

    def take(
        self, name: str, shape: tuple[int, ...], part: Slice | None = None, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Missing tensors and wrong shapes or types are collected, so that `finish` can name all of them in one
        error."""
        dtype = dtype or self.dtype
        wanted = list(shape)
        if part is not None:
            wanted[part.dim] = part.length
        self._count(name)
        problem = self._problem(name, shape, dtype)
        if problem is not None:
            self._problems.append(problem)
            return torch.zeros(wanted, dtype=dtype, device=self.device)
        stored = self._wanted(name, dtype)
        aligned = part if part is None else _aligned(part, shape, stored.shape)
        tensor = self._read(name, stored, aligned).to(dtype).view(wanted)
        return tensor if stored.change is UNCHANGED else _unchanged(tensor, stored.change)

    def _wanted(self, name: str, dtype: torch.dtype) -> Tensor:
        """The tensor in the form that is asked for: blocks are floats, or bytes."""
        stored = self._stored[name][1]
        return stored.as_bytes() if dtype is torch.uint8 and stored.dtype in BLOCKS else stored

    def _read(self, name: str, stored: Tensor, part: Slice | None) -> torch.Tensor:
        """`part` in the stored order of numbers, of any shape."""
        blocks = self._stored[name][1]
        if stored.dtype in BLOCKS:
            cut = part if part and _cuts_blocks(stored, part) else None
            data = self._reader.read(name, None if cut else part, self._is_needed)
            values = dequantize(data, stored.dtype)
            return values.view(stored.shape).narrow(cut.dim, cut.start, cut.length).contiguous() if cut else values
        if blocks.dtype in BLOCKS and part and part.dim == 1:  # of bytes, where the reader counts values
            count, num_bytes = blocks.item
            part = Slice(1, part.start // num_bytes * count, part.length // num_bytes * count)
        return self._reader.read(name, part, self._is_needed).view(_TYPES[stored.dtype])

    def leave(self, prefix: str) -> None:
        self._left.add(prefix)
        if self._progress is not None:
            first, end = (bisect_left(self._sorted_names, prefix + each) for each in (".", "/"))  # which follows "."
            self._progress.add(sum(self._sizes[name] for name in self._sorted_names[first:end]))

    @cached_property
    def _sizes(self) -> dict[str, int]:
        """Bytes of each tensor."""
        return {name: tensor.num_bytes for name, (_, tensor) in self._stored.items()}

    @cached_property
    def _sorted_names(self) -> list[str]:
        return sorted(self._sizes)

    def _problem(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> str | None:
        if name not in self._stored:
            return f"missing {name} {list(shape)}"
        tensor = self._wanted(name, dtype)
        if _without_ones(tensor.shape) != _without_ones(shape):
            return f"{name} has shape {list(tensor.shape)}, not {list(shape)}"
        if tensor.dtype not in STORED_AS.get(dtype, (*FLOATS, *BLOCKS)):
            return f"{name} is stored as {tensor.dtype}, not as {str(dtype).removeprefix('torch.')}"
        return None

    def finish(self) -> None:
        """Raises ValueError naming tensors that were missing, wrong, or neither taken nor left to other ranks nor
        ignored."""
        names = sorted(self._stored.keys() - self._taken)
        unexpected = [name for name in names if self._is_needed(name)]
        problems = self._problems + [f"unexpected {name}" for name in unexpected]
        if problems:
            shown = "; ".join(problems[:20]) + (f"; and {len(problems) - 20} more" if len(problems) > 20 else "")
            raise ValueError(f"the weights in {self._folder} do not fit the model: {shown}")

    def _is_needed(self, name: str) -> bool:
        """False if other ranks have the tensor, or no rank needs it."""
        return self._left.isdisjoint(_prefixes(name)) and not self._ignored(name)

    def _count(self, name: str) -> None:
        self._taken.add(name)
        if self._progress is not None and name not in self._counted:
            self._counted.add(name)
            self._progress.add(self._sizes.get(name, 0))


class RandomWeights:
    """A `WeightSource` of random numbers; on the meta device, of shapes only.

    Each tensor is drawn whole from its own seed, then sliced, so it depends neither on the ranks nor on the loading
    order.
    """

    def __init__(self, seed: int, dtype: torch.dtype, device: torch.device) -> None:
        self._seed = seed
        self.dtype = dtype
        self.device = device

    def __contains__(self, name: str) -> bool:
        return False  # has no tensors besides those that layers ask for

    def take(
        self, name: str, shape: tuple[int, ...], part: Slice | None = None, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        if self.device.type == "meta":
            tensor = torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
        else:
            digest = hashlib.sha256(f"{self._seed}/{name}".encode()).digest()
            generator = torch.Generator(self.device).manual_seed(int.from_bytes(digest[:7], "little"))
            tensor = _draw(name, shape, dtype or self.dtype, generator)
        return tensor if part is None else tensor.narrow(part.dim, part.start, part.length).clone()

    def leave(self, prefix: str) -> None:
        pass  # is not drawn


def _draw(name: str, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    if name.endswith("g_idx"):
        return torch.zeros(shape, dtype=dtype, device=generator.device)
    if dtype == torch.uint8 and name.endswith(".weight"):  # GGUF's blocks, with scales of two such bytes
        return torch.randint(0, 32, shape, dtype=dtype, device=generator.device, generator=generator)
    if dtype == torch.uint8:
        low, high = (DUMMY_EXPONENT, DUMMY_EXPONENT + 1) if "scale" in name.rpartition(".")[2] else (0, 256)
        return torch.randint(low, high, shape, dtype=dtype, device=generator.device, generator=generator)
    if dtype == torch.int8:
        return torch.randint(-8, 9, shape, dtype=dtype, device=generator.device, generator=generator)
    if dtype == torch.int32:
        bits = torch.iinfo(dtype)
        return torch.randint(bits.min, bits.max, shape, dtype=dtype, device=generator.device, generator=generator)
    if "scale" in name.rpartition(".")[2]:
        scale = 1 / DUMMY_SCALE if name.endswith("global_scale") else DUMMY_SCALE  # nvfp4's global scale divides
        if dtype == torch.float8_e4m3fn:
            scale = 1.0  # of nvfp4, beside the global scale
        return torch.full(shape, scale, device=generator.device).to(dtype)
    if dtype == torch.float8_e4m3fn:
        return torch.empty(shape, device=generator.device).normal_(0.0, 1.0, generator=generator).to(dtype)
    mean = 1.0 if name.endswith("norm.weight") else 0.0
    return torch.empty(shape, dtype=dtype, device=generator.device).normal_(mean, DUMMY_STD, generator=generator)


def _cuts_blocks(tensor: Tensor, part: Slice) -> bool:
    """Whether a part of a quantized tensor begins or ends within blocks."""
    values, _ = tensor.item
    return part.dim == len(tensor.shape) - 1 and bool(part.start % values or part.length % values)


def _unchanged(tensor: torch.Tensor, change: Change) -> torch.Tensor:
    """Undo `change`."""
    if change.head_dim:
        tensor = tensor.unflatten(0, (-1, change.head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)
    return tensor - change.offset if change.offset else tensor


def _without_ones(shape: tuple[int, ...]) -> list[int]:
    """The sizes that say how numbers lie: writers of scales differ in dimensions of 1."""
    return [size for size in shape if size != 1]


def _aligned(part: Slice, shape: tuple[int, ...], stored: tuple[int, ...]) -> Slice | None:
    """`part` of a tensor of `shape`, as a part of the same tensor in the shape `stored`; None: all."""
    if shape[part.dim] == 1:
        return None
    place = len(_without_ones(shape[: part.dim]))
    dims = [dim for dim, size in enumerate(stored) if size != 1]
    return Slice(dims[place], part.start, part.length)


def tensor_names(folder: Path) -> list[str]:
    """The names of all tensors in the *.safetensors files of a folder; none if it has no such files."""
    index = read_json(folder / "model.safetensors.index.json")
    if index is not None:
        return list(index["weight_map"])
    return [name for path in folder.glob("*.safetensors") for name in read_header(path)]


def tensor_shape(folder: Path, name: str) -> list[int]:
    """Raises ValueError if no *.safetensors file of the folder has the tensor."""
    for path in folder.glob("*.safetensors"):
        tensors = read_header(path)
        if name in tensors:
            return list(tensors[name].shape)
    raise ValueError(f"{folder} has no tensor {name}")


def _read_headers(paths: Sequence[Path]) -> dict[str, tuple[Path, Tensor]]:
    """Raises ValueError for a tensor that is in two files, of which only one can be loaded."""
    stored: dict[str, tuple[Path, Tensor]] = {}
    for path in paths:
        for name, tensor in read_header(path).items():
            first, _ = stored.setdefault(name, (path, tensor))
            if first != path:
                raise ValueError(f"{path.parent} has {name} in {first.name} and in {path.name}; remove one of these")
    return stored


def _prefixes(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts))]
