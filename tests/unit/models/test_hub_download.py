"""A download from the hub is reported in GB, without the library's bars and handlers."""

import logging
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub.utils._paths import filter_repo_objects

from proa_engine.observability import progress
from proa_engine.sources import hub_download
from proa_engine.sources.resolve import resolve_model

SIZES = (3_000_000_000, 1_000_000_000)


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "FIRST_SECONDS", 0.0)
    monkeypatch.setattr(progress, "NUM_LINES", 10**9)


@pytest.fixture(autouse=True)
def library() -> Iterator[logging.Logger]:
    logger = logging.getLogger("huggingface_hub")
    handlers = logger.handlers[:]
    logger.addHandler(logging.StreamHandler())
    yield logger
    logger.handlers[:] = handlers


def serve_files(monkeypatch: pytest.MonkeyPatch, *, cached: bool = False, error: Exception | None = None) -> None:
    """Let the hub have files of `SIZES`, with the bars that the library makes."""

    def snapshot_download(model: str, *, tqdm_class: Any, dry_run: bool = False, **options: Any) -> str | list[Any]:
        if dry_run:
            if error is not None:
                raise error
            return [SimpleNamespace(file_size=size, will_download=not cached) for size in SIZES]
        on_disk = tqdm_class(name="huggingface_hub.snapshot_download", total=0, unit="B", disable=None)
        others = [tqdm_class(name="huggingface_hub.snapshot_download.transfer", unit="B"), tqdm_class(total=2)]
        for size in () if cached else SIZES:
            on_disk.total = (on_disk.total or 0) + size
            on_disk.refresh()
            on_disk.update(size)
            for bar in others:
                bar.update(size)
        on_disk.set_postfix_str("1 GB/s", refresh=False)
        return "/cache"

    monkeypatch.setattr(hub_download, "snapshot_download", snapshot_download)


HUB_FILES = (  # of a repository
    *("README.md", "config.json", "model-Q4_K_M.gguf", "model-Q4_K_S.gguf", "model-q8_0.gguf", "mmproj-model-f16.gguf"),
    *("model.i1-Q6_K.gguf", "BF16/model-BF16-00001-of-00002.gguf", "BF16/model-BF16-00002-of-00002.gguf"),
)


@pytest.mark.parametrize(
    ("file_type", "downloaded", "chosen"),
    [
        ("Q4_K_M", ["model-Q4_K_M.gguf"], "model-Q4_K_M.gguf"),
        ("Q8_0", ["model-q8_0.gguf"], "model-q8_0.gguf"),
        ("q6_k", ["model.i1-Q6_K.gguf"], "model.i1-Q6_K.gguf"),
        ("BF16", [*HUB_FILES[-2:]], "BF16/model-BF16-00001-of-00002.gguf"),
        ("F16", ["mmproj-model-f16.gguf"], None),
        ("Q2_K", [], None),
    ],
)
def test_of_a_repository_of_gguf_files_those_of_one_type_are_downloaded(
    file_type: str, downloaded: list[str], chosen: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def snapshot_download(model: str, *, allow_patterns: list[str], dry_run: bool = False, **_: Any) -> str | list[Any]:
        assert model == "org/model-GGUF"
        wanted = list(filter_repo_objects(HUB_FILES, allow_patterns=allow_patterns))
        for name in [] if dry_run else wanted:
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).touch()
        return [] if dry_run else str(tmp_path)

    monkeypatch.setattr(hub_download, "snapshot_download", snapshot_download)
    with nullcontext() if chosen else pytest.raises(ValueError, match=f"has no GGUF file of the type {file_type}"):
        assert resolve_model(f"org/model-GGUF:{file_type}") == tmp_path / str(chosen)
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.*")) == sorted(downloaded)


def download(caplog: pytest.LogCaptureFixture) -> list[str]:
    with caplog.at_level(logging.INFO, "proa_engine"):
        assert hub_download.download("org/big", None, ["*"]) == Path("/cache")
    return caplog.messages


def test_a_download_is_reported_in_gb_with_percent(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    serve_files(monkeypatch)
    first, second, last = download(caplog)
    assert first == "downloading 4.0 GB of org/big"
    assert second == "downloading org/big: 3.0 of 4.0 GB (75 %), about 1 s left"
    assert last.startswith("downloaded org/big in ")
    assert capsys.readouterr().err == ""


def test_nothing_is_reported_of_files_in_the_cache(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    serve_files(monkeypatch, cached=True)
    assert download(caplog) == []


def test_without_the_hub_the_cache_is_used(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    serve_files(monkeypatch, error=OSError("no network"))
    assert download(caplog) == []


def test_the_librarys_warnings_are_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, library: logging.Logger
) -> None:
    serve_files(monkeypatch, cached=True)
    download(caplog)
    assert not library.handlers
    assert library.propagate
