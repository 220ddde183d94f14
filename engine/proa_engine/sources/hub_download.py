"""Downloads from the Hugging Face hub, with lines about their progress in place of the library's bars."""

import logging
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.utils.tqdm import tqdm

from proa_engine.observability.library_logs import use_our_handlers
from proa_engine.observability.progress import Progress, gigabytes

_BYTES_BAR = "huggingface_hub.snapshot_download"  # the library's name for the bar of bytes on disk
_log = logging.getLogger(__name__)


def download(model: str, revision: str | None, patterns: list[str], cache_dir: str | None = None) -> Path:
    """Return the folder of the files that match `patterns`, after those that are not in the cache are downloaded.

    `cache_dir` None: the hub's, HF_HUB_CACHE. Raises the errors of the library and of its HTTP client.
    """
    use_our_handlers("huggingface_hub")
    snapshot = partial(snapshot_download, model, revision=revision, allow_patterns=patterns, cache_dir=cache_dir)
    num_bytes = _bytes_to_download(model, snapshot)
    if not num_bytes:  # all is in the cache; or the hub cannot be reached, and if the cache is not enough this raises
        return Path(snapshot(tqdm_class=_no_bars()))
    started = time.monotonic()
    _log.info("downloading %s GB of %s", gigabytes(num_bytes), model)
    progress = Progress(_log.info, f"downloading {model}", num_bytes, "GB", scale=1e9)
    folder = snapshot(tqdm_class=_no_bars(progress))
    _log.info("downloaded %s in %.1f s", model, time.monotonic() - started)
    return Path(folder)


def _bytes_to_download(model: str, snapshot: Callable[..., Any]) -> int:
    """0 if the hub does not tell."""
    try:
        files = snapshot(tqdm_class=_no_bars(), dry_run=True)
    except Exception as error:  # the download itself raises it, unless the files are in the cache
        _log.debug("the size of %s is not known: %s", model, error)
        return 0
    return sum(file.file_size or 0 for file in files if file.will_download)


def _no_bars(progress: Progress | None = None) -> type[tqdm]:
    """A class of bars that show nothing. Bytes are added to `progress`, from several threads."""
    lock = Lock()

    class NoBar(tqdm):
        def __init__(self, *args: Any, **options: Any) -> None:
            self.counts_bytes = options.get("name") == _BYTES_BAR
            super().__init__(*args, **options | {"disable": True})  # type: ignore[no-untyped-call]

        def update(self, n: float | None = 1) -> None:
            if progress is not None and self.counts_bytes:
                with lock:
                    progress.add(n or 0)

    return NoBar
