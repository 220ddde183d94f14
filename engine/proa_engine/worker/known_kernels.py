"""KnownKernels: the list of kernels that an earlier start compiled, kept beside them in Triton's cache.

With it, a start knows without a program that imports torch and runs steps on meta tensors that every kernel is there.
The list belongs to a configuration, a model, this version of Proa, Triton and torch, and a kind of GPU. Should it be
incomplete all the same, the worker compiles what is missing when it warms up, and deletes it (`forget`).
"""

import hashlib
import os
from collections.abc import Iterable
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

import msgspec

from proa.options import flat
from proa_engine.config import EngineConfig
from proa_engine.sources.folders import read_config, weight_files
from proa_engine.sources.gguf.header import is_gguf
from proa_engine.sources.resolve import LocalFolder, source_of
from proa_engine.sources.weight_headers import read_headers

_FOLDER = "proa"  # in Triton's cache, whose own folders have longer names
_MAX_MODEL_FILE_BYTES = 1 << 20  # tokenizers and lists of tensors are larger
_PLACES = ("TRITON_CACHE_DIR", "TRITON_HOME")
# Fields of the configuration that may differ between two starts and decide no kernel. The model's files stand for its
# name.
UNRELATED = frozenset(
    {
        *("model", "revision", "served_model_name", "tokenizer", "skip_tokenizer_init", "generation_config"),
        *("override_generation_config", "download_dir", "download_cache_size", "load_format", "seed"),
        *("max_waiting_requests", "num_gpu_blocks_override", "kv_cache_memory_bytes", "gpu_memory_utilization"),
        *("kv_transfer_address", "kv_transfer_sources", "kv_offloading_path", "kv_disk_path", "kv_disk_size"),
        *("kv_disk_write_mb_per_second", "role", "peer_tls", "compile_cache", "async_scheduling", "scheduling_policy"),
        *("lora_modules", "node_rank", "master_addr", "master_port", "worker_sockets"),
    }
)


class GpuKind(NamedTuple):
    """What decides the kernels of a GPU."""

    capability: int  # compute capability times 10: 90 for Hopper
    multiprocessors: int


class KnownKernels:
    """Of one configuration. Imports neither torch nor Triton."""

    def __init__(self, config: EngineConfig) -> None:
        self._cache = _triton_cache()
        self._key = _key(config, self._cache)

    def may_be_complete(self) -> bool:
        """Whether there is a list for some kind of GPU."""
        with suppress(OSError):
            return any(name.startswith(self._key) for name in os.listdir(self._cache / _FOLDER))
        return False

    def count(self, gpu: GpuKind) -> int | None:
        """Return the number of kernels for such GPUs, if all are in the cache."""
        with suppress(OSError, ValueError):  # there is no list, or a crash of the machine has damaged it
            entries = self._path(gpu).read_text().split()
            if entries and all((self._cache / entry).is_dir() for entry in entries):
                return len(entries)
        return None

    def remember(self, gpu: GpuKind, entries: Iterable[str]) -> None:
        """Keep the list: the kernels' folders in the cache. Other machines may write the same one at the same time."""
        path = self._path(gpu)
        with suppress(OSError):  # no space is left: the next start does without
            path.parent.mkdir(parents=True, exist_ok=True)
            unfinished = path.with_name(f"unfinished-{uuid4()}")
            try:
                unfinished.write_text("".join(f"{entry}\n" for entry in entries))
                unfinished.replace(path)
            finally:
                unfinished.unlink(missing_ok=True)

    def forget(self, gpu: GpuKind) -> None:
        with suppress(OSError):  # the folder may be read-only
            self._path(gpu).unlink(missing_ok=True)

    def _path(self, gpu: GpuKind) -> Path:
        return self._cache / _FOLDER / f"{self._key}-{gpu.capability}-{gpu.multiprocessors}"


def _triton_cache() -> Path:
    """Return Triton's cache as Triton chooses it."""
    if folder := os.environ.get("TRITON_CACHE_DIR"):
        return Path(folder)
    home = os.environ.get("TRITON_HOME") or os.path.expanduser("~")  # `Path.home` raises for a user without one
    return Path(home) / ".triton" / "cache"


def _key(config: EngineConfig, cache: Path) -> str:
    digest = hashlib.sha256()
    # Triton finds no kernel after the cache was moved.
    for part in (str(cache.absolute()), _fields(config), _model(config), _versions(), _environment()):
        digest.update(msgspec.json.encode(part, order="sorted") + b"\n")
    folder = Path(__file__).parents[1]  # Proa's own files
    for path in sorted(folder.rglob("*.py")):
        digest.update(f"\n{path.relative_to(folder)}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:32]


def _fields(config: EngineConfig) -> dict[str, object]:
    fields: dict[str, object] = msgspec.to_builtins(flat(config))
    return {name: value for name, value in fields.items() if name not in UNRELATED}


def _model(config: EngineConfig) -> list[str]:
    """Return the JSON files of a local model, of a GGUF file its header, or another one's name, by which it is
    downloaded."""
    source = source_of(config.model)
    if not isinstance(source, LocalFolder):
        return [config.model, config.revision or ""]
    if is_gguf(source.path):
        return [repr(part) for part in (read_config(source.path), read_headers(weight_files(source.path)))]
    files = (path for path in sorted(source.path.glob("*.json")) if path.is_file())
    return [
        f"{path.name}\n{hashlib.sha256(path.read_bytes()).hexdigest()}"
        for path in files
        if path.stat().st_size <= _MAX_MODEL_FILE_BYTES
    ]


def _versions() -> list[str]:
    return [f"{name} {version(name)}" for name in ("torch", "triton")]


def _environment() -> list[str]:
    """Return the variables that change what is compiled."""
    return [
        f"{name}={text}"
        for name, text in sorted(os.environ.items())
        if name in ("PROA_DEPENDENT_LAUNCH", "PROA_L2_PREFETCH") or (name.startswith("TRITON_") and name not in _PLACES)
    ]
