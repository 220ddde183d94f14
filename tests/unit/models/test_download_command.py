"""`proa-engine download`: what it asks of the hub, and how it fails."""

from pathlib import Path
from typing import Any

import pytest

from proa_engine.cli import main


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[Any, ...]]:
    """What the hub is asked for: id, revision, whether weights, and the folder to keep it in."""
    requests: list[tuple[Any, ...]] = []

    def snapshot_download(
        repo: str,
        *,
        revision: str | None,
        allow_patterns: list[str],
        cache_dir: str | None,
        tqdm_class: type,
        dry_run: bool = False,
    ) -> str | list[Any]:
        if dry_run:
            return []
        requests.append((repo, revision, "*.safetensors" in allow_patterns, cache_dir))
        return str(tmp_path)

    monkeypatch.setattr("proa_engine.sources.hub_download.snapshot_download", snapshot_download)
    return requests


def test_it_downloads_what_serve_with_the_same_flags_would(asked: list[tuple[Any, ...]]) -> None:
    lora = ("--enable-lora", "--lora-modules", "sql=org/sql")
    model = ("--model", "org/big", "--revision", "v2", "--tokenizer", "org/words")
    assert main(("download", *model, "--port", "6000", "--device", "cuda", *lora)) == 0
    assert asked == [("org/big", "v2", True, None), ("org/words", "v2", False, None), ("org/sql", None, False, None)]


def test_downloads_are_kept_in_the_folder_of_download_dir(asked: list[tuple[Any, ...]]) -> None:
    assert main(("download", "--model", "org/big", "--download-dir", "/models")) == 0
    assert set(asked) == {("org/big", None, True, "/models")}


def test_a_folder_asks_nothing_of_the_hub(asked: list[tuple[Any, ...]]) -> None:
    assert main(("download", "--model", "builtin")) == 0
    assert asked == []


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("--model", "/nowhere"), "model folder /nowhere does not exist"),
        (
            ("--model", "builtin", "--enable-lora", "--lora-modules", "sql=/nowhere"),
            "lora_modules: there is no adapter at /nowhere",
        ),
    ],
)
def test_what_cannot_be_found_is_named(
    flags: tuple[str, ...], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(("download", *flags)) == 1
    assert capsys.readouterr().err.splitlines()[-1] == f"proa-engine: error: {sentence}"
