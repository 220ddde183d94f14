"""Weight sources: memory-mapped safetensors files, of which a rank reads its share; and random numbers."""

import hashlib
import json
from bisect import bisect_left
from collections.abc import Callable
from functools import cached_property
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from proa_engine.layers.weights import Slice
from proa_engine.models.folders import read_json, weight_files
from proa_engine.observability.progress import Progress, gigabytes

DUMMY_STD = 0.02
DUMMY_SCALE = 0.005  # scale of dummy quantized weights
DUMMY_EXPONENT = 120  # of dummy mxfp4 weights, biased by 127: random bits then have a deviation of 0.02
FLOATS = ("F64", "F32", "F16", "BF16")  # safetensors' names
STORED_AS = {  # all other types: FLOATS
    torch.float8_e4m3fn: ("F8_E4M3",),
    torch.int8: ("I8",),
    torch.int32: ("I32",),
    torch.int64: ("I64",),
    torch.uint8: ("U8",),
}


class SafetensorsCheckpoint:
    """The *.safetensors files of a folder as a `WeightSource`. Tracks which tensors were taken."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self.device = device
        self._folder = folder
        self._paths = weight_files(folder)
        self._files = [_open(path) for path in self._paths]
        self._file_of = {name: file for file in self._files for name in _names(file)}
        self._taken: set[str] = set()
        self._counted: set[str] = set()  # whose bytes are loaded, unlike those of `take_names`
        self._left: set[str] = set()  # prefixes
        self._problems: list[str] = []
        self._ignored: Callable[[str], bool] = lambda _: False
        self._progress: Progress | None = None

    def begin(self, ignored: Callable[[str], bool], report: Callable[[str], None]) -> None:
        """Report the progress of what follows. `ignored` are the names of tensors that this rank does not need."""
        self._ignored = ignored
        num_bytes = sum(size for name, size in self._sizes.items() if not ignored(name))
        self._progress = Progress(report, "loading weights", num_bytes, "GB", scale=1e9)
        files = f"{len(self._paths)} files" if len(self._paths) > 1 else "1 file"
        report(f"loading {gigabytes(num_bytes)} GB of weights from {files} of {self._folder}")

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def take_names(self) -> dict[str, tuple[int, ...]]:
        """The full shape of every tensor. All count as taken: the caller names those that it does not use."""
        self._taken.update(self._file_of)
        return {
            name: tuple(file.get_slice(name).get_shape())  # type: ignore[no-untyped-call]
            for name, file in self._file_of.items()
        }

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
        problem = self._problem(name, list(shape), dtype)
        if problem is not None:
            self._problems.append(problem)
            return torch.zeros(wanted, dtype=dtype, device=self.device)
        index = [slice(None)] * len(shape)
        if part is not None:
            index[part.dim] = slice(part.start, part.start + part.length)
        file = self._file_of[name]
        view = file.get_slice(name)  # type: ignore[no-untyped-call]
        # A scalar may be stored without dimensions and then cannot be sliced.
        tensor: torch.Tensor = (
            view[tuple(index)] if view.get_shape() else file.get_tensor(name)  # type: ignore[no-untyped-call]
        )
        return tensor.to(device=self.device, dtype=dtype, copy=True).view(wanted).contiguous()

    def leave(self, prefix: str) -> None:
        self._left.add(prefix)
        if self._progress is not None:
            first, end = (bisect_left(self._sorted_names, prefix + each) for each in (".", "/"))  # which follows "."
            self._progress.add(sum(self._sizes[name] for name in self._sorted_names[first:end]))

    @cached_property
    def _sizes(self) -> dict[str, int]:
        """Bytes of each tensor."""
        return {name: size for path in self._paths for name, size in _sizes(path).items()}

    @cached_property
    def _sorted_names(self) -> list[str]:
        return sorted(self._sizes)

    def _problem(self, name: str, shape: list[int], dtype: torch.dtype) -> str | None:
        if name not in self._file_of:
            return f"missing {name} {shape}"
        view = self._file_of[name].get_slice(name)  # type: ignore[no-untyped-call]
        if view.get_shape() != shape and not (view.get_shape() == [] and shape == [1]):
            return f"{name} has shape {view.get_shape()}, not {shape}"
        stored = view.get_dtype()
        if stored not in STORED_AS.get(dtype, FLOATS):
            return f"{name} is stored as {stored}, not as {str(dtype).removeprefix('torch.')}"
        return None

    def finish(self) -> None:
        """Close the files. Raises ValueError naming tensors that were missing, wrong, or neither taken nor left to
        other ranks nor ignored."""
        names = sorted(self._file_of.keys() - self._taken)
        unexpected = [name for name in names if self._left.isdisjoint(_prefixes(name)) and not self._ignored(name)]
        problems = self._problems + [f"unexpected {name}" for name in unexpected]
        self._files.clear()
        self._file_of.clear()
        if problems:
            shown = "; ".join(problems[:20]) + (f"; and {len(problems) - 20} more" if len(problems) > 20 else "")
            raise ValueError(f"the weights in {self._folder} do not fit the model: {shown}")

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
    if dtype == torch.uint8:
        low, high = (DUMMY_EXPONENT, DUMMY_EXPONENT + 1) if name.endswith("scales") else (0, 256)
        return torch.randint(low, high, shape, dtype=dtype, device=generator.device, generator=generator)
    if dtype in (torch.int8, torch.int32):
        bits = torch.iinfo(dtype)
        return torch.randint(bits.min, bits.max, shape, dtype=dtype, device=generator.device, generator=generator)
    if "scale" in name.rpartition(".")[2]:
        return torch.full(shape, DUMMY_SCALE, dtype=dtype, device=generator.device)
    if dtype == torch.float8_e4m3fn:
        return torch.empty(shape, device=generator.device).normal_(0.0, 1.0, generator=generator).to(dtype)
    mean = 1.0 if name.endswith("norm.weight") else 0.0
    return torch.empty(shape, dtype=dtype, device=generator.device).normal_(mean, DUMMY_STD, generator=generator)


def tensor_names(folder: Path) -> list[str]:
    """The names of all tensors in the *.safetensors files of a folder; none if it has no such files."""
    index = read_json(folder / "model.safetensors.index.json")
    if index is not None:
        return list(index["weight_map"])
    return [name for path in folder.glob("*.safetensors") for name in _names(_open(path))]


def tensor_shape(folder: Path, name: str) -> list[int]:
    """Raises ValueError if no *.safetensors file of the folder has the tensor."""
    for path in folder.glob("*.safetensors"):
        file = _open(path)
        if name in _names(file):
            shape: list[int] = file.get_slice(name).get_shape()  # type: ignore[no-untyped-call]
            return shape
    raise ValueError(f"{folder} has no tensor {name}")


def _prefixes(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts))]


def _names(file: safe_open) -> list[str]:
    return list(file.keys())  # type: ignore[no-untyped-call]


def _sizes(path: Path) -> dict[str, int]:
    """Bytes of each tensor of a *.safetensors file, from its header. safetensors would make an object for each."""
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    ends = {name: tensor["data_offsets"] for name, tensor in header.items() if name != "__metadata__"}
    return {name: end - start for name, (start, end) in ends.items()}


def _open(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise ValueError(f"{path} is not a readable safetensors file: {error}") from error
