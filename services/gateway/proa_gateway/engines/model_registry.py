"""ModelRegistry: the models that engines brought, each with its tokenizer; refuses replicas that do not match.

Knows nothing of sessions, loads or HTTP.
"""

import asyncio
import logging
import time
from collections.abc import Collection, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field
from pathlib import Path

from proa.tokenizer_files import digest, read_tokenizer_files
from proa_gateway.engines.client import EngineRefused, ReadFiles
from proa_gateway.errors import EngineUnavailable
from proa_gateway.tokenizer import Tokenizer
from proa_gateway.types import ModelInfo

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class ServedModel:
    """A model that requests may name."""

    info: ModelInfo
    tokenizer: Tokenizer
    created: int = field(default_factory=lambda: int(time.time()))  # Unix seconds, when the gateway met it

    @property
    def name(self) -> str:
        return self.info.model_name


class ModelRegistry:
    """`folder`: a tokenizer folder that stands in for what the engines would send."""

    def __init__(self, executor: Executor, *, folder: Path | None = None) -> None:
        self._executor = executor
        self._folder = folder
        self._models: dict[str, ServedModel] = {}
        self._engines: dict[str, set[str]] = {}  # model name -> addresses that were accepted and are still there
        self._locks: dict[str, asyncio.Lock] = {}

    def names(self) -> Collection[str]:
        """Every name that an engine has brought."""
        return self._models.keys()

    def get(self, name: str) -> ServedModel:
        """Raises `EngineUnavailable` for a model that no engine has brought yet."""
        try:
            return self._models[name]
        except KeyError:
            raise EngineUnavailable(f"No engine is ready for the model {name!r}.") from None

    async def accept(self, address: str, info: ModelInfo, read_files: ReadFiles) -> None:
        """Learns the model that an engine brings. Raises `EngineRefused` where its tokenizer is another than that of
        the engines already there under the same name."""
        async with self._locks.setdefault(info.model_name, asyncio.Lock()):
            known = self._models.get(info.model_name)
            others = self._engines.setdefault(info.model_name, set()) - {address}
            if known is None or known.info != info:
                same = known is not None and known.info.tokenizer_digest == info.tokenizer_digest
                if not same and others:
                    raise EngineRefused(
                        f"its tokenizer for {info.model_name} is not that of {', '.join(sorted(others))}"
                    )
                tokenizer = known.tokenizer if known and same else await self._load(info, read_files)
                self._models[info.model_name] = ServedModel(info, tokenizer)
            self._engines[info.model_name].add(address)

    def forget(self, address: str) -> None:
        """An engine went away. Its model stays known; another tokenizer may come under the name when all are gone."""
        for addresses in self._engines.values():
            addresses.discard(address)

    async def _load(self, info: ModelInfo, read_files: ReadFiles) -> Tokenizer:
        started = time.monotonic()
        if self._folder is not None:
            files: Mapping[str, bytes] = read_tokenizer_files(self._folder)
        elif not info.tokenizer_digest:
            raise EngineRefused("it has no tokenizer, and the gateway was given none (--tokenizer)")
        else:
            files = await read_files()
            if digest(files) != info.tokenizer_digest:
                raise EngineRefused("its tokenizer's files do not have the digest that it says")
        loop = asyncio.get_running_loop()
        try:
            tokenizer = await loop.run_in_executor(self._executor, Tokenizer, files, self._executor)
        except ValueError as error:
            raise EngineRefused(f"its tokenizer cannot be used: {error}") from error
        _log.info("tokenizer of %s ready after %.2f s", info.model_name, time.monotonic() - started)
        return tokenizer
