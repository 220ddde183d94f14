"""Read a LoRA adapter as `peft` saves it: adapter_config.json and adapter_model.safetensors."""

import hashlib
import json
import math
import os
import reprlib
import stat
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open

from proa_engine.core.lora_store import LoraInvalid, LoraNotFound
from proa_engine.kernels.products.lora import SegmentMatrices
from proa_engine.layers.lora import LoraSegment, module_name
from proa_engine.layers.weights import Slice
from proa_engine.sources.resolve import LORA_CONFIG_FILE, LORA_WEIGHTS_FILE

_HASHED_BYTES = 1 << 20
_MAX_CONFIG_BYTES = 1 << 20
_DTYPES = ("F64", "F32", "F16", "BF16")  # safetensors' names

# Fields that change what is computed, and the values with which they do not.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "bias": ("none", None),
    "use_dora": (False, None),
    "lora_bias": (False, None),
    "fan_in_fan_out": (False, None),
    "modules_to_save": (None, []),
    "trainable_token_indices": (None, [], {}),
    "target_parameters": (None, []),
    "layer_replication": (None, []),
    "alpha_pattern": (None, {}),
    "use_qalora": (False, None),
    "use_bdlora": (False, None),
    "alora_invocation_tokens": (None, []),
    "arrow_config": (None, {}),
    "kasa_config": (None, {}),
    # The others (pissa, olora, corda, loftq, lora_ga) have changed the model's own weights.
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal"),
}


def digest(folder: Path) -> str:
    """The SHA-256, in hexadecimal, over the bytes of the two files. Raises `LoraNotFound`, and `LoraInvalid` if one is
    not a regular file."""
    state = hashlib.sha256()
    for name in (LORA_CONFIG_FILE, LORA_WEIGHTS_FILE):
        try:
            with _open(folder / name) as file:
                while chunk := file.read(_HASHED_BYTES):
                    state.update(chunk)
        except FileNotFoundError as error:
            raise LoraNotFound(f"there is no adapter at {folder}: {name} is missing") from error
        except OSError as error:
            raise LoraNotFound(f"the adapter at {folder} cannot be read: {error}") from error
    return state.hexdigest()


def _open(path: Path) -> BinaryIO:
    """Open a regular file. To open a FIFO, or to read a device, could block for ever."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise LoraInvalid(f"{path} is not a regular file")
    return os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")


@contextmanager
def unchanged(folder: Path) -> Iterator[None]:
    """Raises `LoraInvalid` at its end if a file of the adapter was replaced or written meanwhile."""
    before = _versions(folder)
    yield
    if _versions(folder) != before:
        raise LoraInvalid(f"the adapter at {folder} changed while it was read; load it again")


def _versions(folder: Path) -> list[tuple[int, int, int] | None]:
    """Return what identifies the content of the two files; None for a missing one."""
    versions: list[tuple[int, int, int] | None] = []
    for name in (LORA_CONFIG_FILE, LORA_WEIGHTS_FILE):
        try:
            status = (folder / name).stat()
        except OSError:
            versions.append(None)
        else:
            versions.append((status.st_ino, status.st_size, status.st_mtime_ns))
    return versions


class LoraWeights:
    """An open adapter. Its matrices are read when they are asked for, and only the part that a rank needs.

    Raises `LoraInvalid` for what the engine does not support, and for matrices that do not fit the model.
    """

    def __init__(self, folder: Path, weights: Any, max_rank: int, dtype: torch.dtype) -> None:
        config = _read_config(folder)
        self._folder = folder
        self._weights = weights  # as from `safe_open`
        self._alpha = _read_alpha(config, folder)
        self._ranks = _read_ranks(config)
        self._is_rank_stabilized = bool(config.get("use_rslora"))
        self._max_rank = max_rank
        self._dtype = dtype  # that the matrices are converted to
        self._targets = _Targets.read(config)
        self._names: dict[str, dict[str, str]] = {}  # module -> "A" and "B" -> the tensor's name
        for name in list(weights.keys()):
            module, matrix = _parse(name, folder)
            other = self._names.setdefault(module, {}).setdefault(matrix, name)
            if other != name:
                raise LoraInvalid(f"the adapter at {folder} has lora_{matrix} of {module} twice: {other} and {name}")
        if not self._names:
            raise LoraInvalid(
                f"the adapter at {folder} has no matrices: {LORA_WEIGHTS_FILE} holds no tensors, which ZeRO-3 writes "
                "if the weights were not gathered before they were saved; save the adapter again"
            )

    @property
    def modules(self) -> set[str]:
        """Names of the modules with matrices, as `module_name` gives them."""
        return set(self._names)

    def missing(self, modules: Collection[str]) -> list[str]:
        """Those of the model's `modules` that the configuration names and the adapter has no matrices for."""
        return sorted(each for each in modules if each not in self._names and self._targets.include(each))

    def read(self, segment: LoraSegment) -> SegmentMatrices | None:
        """This rank's part of a module's matrices; None if the adapter has none for it."""
        names = self._names.get(segment.module)
        if names is None:
            return None
        if names.keys() != {"A", "B"}:
            raise LoraInvalid(f"the adapter at {self._folder} has only one of lora_A and lora_B of {segment.module}")
        shape = self._weights.get_slice(names["A"]).get_shape()
        rank = shape[0] if shape else 0
        if rank == 0:
            raise LoraInvalid(f"{names['A']} of the adapter at {self._folder} has shape {shape}, without a rank")
        if rank > self._max_rank:
            raise LoraInvalid(
                f"the adapter at {self._folder} has rank {rank}; the most is {self._max_rank} (--max-lora-rank)"
            )
        if self._ranks and rank not in self._ranks:
            ranks = " or ".join(map(str, sorted(self._ranks)))
            message = f"{names['A']} of the adapter at {self._folder} has rank {rank}, not {ranks} as configured"
            raise LoraInvalid(message)
        a = self._take(names["A"], (rank, segment.in_features), [segment.columns] if segment.columns else [])
        b = self._take(names["B"], (segment.out_features, rank), segment.rows)
        scale = self._alpha / (rank**0.5 if self._is_rank_stabilized else rank)
        self._check_values(names["A"], a, 1.0)
        self._check_values(names["B"], b, scale)
        return SegmentMatrices(a, b, scale)

    def _check_values(self, name: str, matrix: torch.Tensor, scale: float) -> None:
        """Check that the matrix, its scale and their product are finite numbers of the engine's type."""
        lowest, highest = map(float, matrix.aminmax())  # NaN if any is, and NaN is not less than anything
        factor = max(1.0, abs(scale))
        if not (max(abs(lowest), abs(highest), 1.0) * factor <= torch.finfo(self._dtype).max and lowest <= highest):
            raise LoraInvalid(
                f"{name} of the adapter at {self._folder} has values that are not finite numbers in {self._dtype}, "
                f"as they are or times {scale:g}"
            )

    def _take(self, name: str, shape: tuple[int, int], parts: Sequence[Slice]) -> torch.Tensor:
        """The tensor, or its `parts`, one after the other."""
        view = self._weights.get_slice(name)
        if view.get_dtype() not in _DTYPES:
            raise LoraInvalid(f"{name} of the adapter at {self._folder} has the type {view.get_dtype()}")
        if tuple(view.get_shape()) != shape:
            raise LoraInvalid(
                f"{name} of the adapter at {self._folder} has shape {view.get_shape()}, not {list(shape)}"
            )
        ranges = [(part.dim, slice(part.start, part.start + part.length)) for part in parts]
        taken = [view[chosen] if dim == 0 else view[:, chosen] for dim, chosen in ranges] or [view[:]]
        return torch.cat(taken) if len(taken) > 1 else taken[0]


@contextmanager
def open_lora(folder: Path, max_rank: int, dtype: torch.dtype) -> Iterator[LoraWeights]:
    """Raises `LoraInvalid` if the files are not an adapter's, or not one that the engine supports."""
    try:
        with safe_open(folder / LORA_WEIGHTS_FILE, framework="pt") as weights:
            yield LoraWeights(folder, weights, max_rank, dtype)
    except SafetensorError as error:
        raise LoraInvalid(f"{folder / LORA_WEIGHTS_FILE} is not a readable safetensors file: {error}") from error


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / LORA_CONFIG_FILE
    with _open(path) as file:
        content = file.read(_MAX_CONFIG_BYTES + 1)
    if len(content) > _MAX_CONFIG_BYTES:
        raise LoraInvalid(f"{path} must not be larger than {_MAX_CONFIG_BYTES} bytes")
    try:
        config = json.loads(content)
    except ValueError as error:
        raise LoraInvalid(f"{path} is not JSON: {error}") from error
    except RecursionError:
        raise LoraInvalid(f"{path} is not an adapter's: its JSON is nested too deeply") from None
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise LoraInvalid(f"{path} has no peft_type LORA")
    for name, neutral in _NEUTRAL.items():
        if config.get(name) not in neutral:
            raise LoraInvalid(f"adapters with {name} {reprlib.repr(config[name])} are not supported ({folder})")
    return config


def _read_alpha(config: dict[str, Any], folder: Path) -> float:
    alpha = config.get("lora_alpha")
    number = math.nan
    if isinstance(alpha, int | float) and not isinstance(alpha, bool):
        with suppress(OverflowError):  # an integer of hundreds of digits
            number = float(alpha)
    if not math.isfinite(number):
        raise LoraInvalid(f"{folder / LORA_CONFIG_FILE} needs a lora_alpha that is a number, not {reprlib.repr(alpha)}")
    return number


def _read_ranks(config: dict[str, Any]) -> frozenset[int]:
    """The ranks that matrices may have. Empty: they are not configured."""
    pattern = config.get("rank_pattern")
    ranks = [config.get("r"), *(pattern.values() if isinstance(pattern, dict) else ())]
    return frozenset(rank for rank in ranks if isinstance(rank, int))


@dataclass(frozen=True, slots=True)
class _Targets:
    """The modules that an adapter is for, as its configuration names them. Of patterns nothing is known: a stranger's
    regular expression may run for ever."""

    ends: tuple[str, ...] | None  # of the modules' names; None: nothing is known
    excluded: tuple[str, ...]
    layers: frozenset[str] | None  # None: all

    @classmethod
    def read(cls, config: dict[str, Any]) -> "_Targets":
        targets, excluded = _strings(config.get("target_modules")), _strings(config.get("exclude_modules") or [])
        if config.get("target_modules") == "all-linear":
            targets = ("",)
        numbers = config.get("layers_to_transform")
        numbers = [numbers] if isinstance(numbers, int) else numbers
        layers = frozenset(map(str, numbers)) if isinstance(numbers, list) and numbers else None
        return cls(None if excluded is None else targets, excluded or (), layers)

    def include(self, module: str) -> bool:
        """Whether a module, named from `layers.` on, certainly belongs to them."""
        number = module.removeprefix("layers.").partition(".")[0]
        if self.ends is None or (self.layers is not None and number not in self.layers):
            return False
        return _has_end(module, self.ends) and not _has_end(module, self.excluded)


def _strings(value: object) -> tuple[str, ...] | None:
    """The modules' names in a list, from `layers.` on if they are whole; None if it is no list of strings."""
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        return None
    return tuple(map(module_name, value))


def _has_end(module: str, ends: tuple[str, ...]) -> bool:
    return any(not end or module == end or module.endswith(f".{end}") for end in ends)


def _parse(name: str, folder: Path) -> tuple[str, str]:
    """The module, and A or B, of a tensor's name."""
    for matrix in ("A", "B"):
        suffix = f".lora_{matrix}.weight"
        if name.endswith(suffix):
            return module_name(name.removesuffix(suffix).removeprefix("base_model.model.")), matrix
    raise LoraInvalid(
        f"{name} of the adapter at {folder} is not supported; supported: lora_A and lora_B of linear layers"
    )
