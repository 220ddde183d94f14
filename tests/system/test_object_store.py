"""Models from a server that speaks S3: downloaded once, by one process of several, and resumed after a kill."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from proa_engine import LLM, LoRARequest, SamplingParams
from proa_engine.builtin import builtin_adapter_folder, builtin_model_folder
from proa_engine.sources import object_download
from proa_engine.sources.cached_versions import Selection
from proa_engine.sources.download_cache import DownloadCache
from proa_engine.sources.object_store import ObjectFolder, ObjectStoreError
from support.documentation import commands
from support.s3 import Meter, S3Server, s3_server

NUM_RANGES = 24  # more than threads, so that some are complete when the last ones begin
RANGE = object_download.RANGE_BYTES
SIZE = NUM_RANGES * RANGE
MODEL = Selection("config.json", ["*.json"], ["*.safetensors"])


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with s3_server(tmp_path_factory.mktemp("s3"), "models", "weights") as server:
        yield server


@pytest.fixture
def environment(store: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in store.environment().items():
        monkeypatch.setenv(name, value)


def files_of(folder: Path) -> dict[str, Path]:
    return {str(each.relative_to(folder)): each for each in folder.rglob("*") if each.is_file()}


def start_download(url: str, folder: Path, environment: Mapping[str, str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "proa_engine", "download", "--model", url, "--download-dir", str(folder)]
    command += ["--skip-tokenizer-init"]
    return subprocess.Popen(command, env={**os.environ, **environment}, stderr=subprocess.PIPE, text=True)


def test_a_download_that_is_killed_continues_with_what_is_missing(store: S3Server, tmp_path: Path) -> None:
    url, cache = "s3://models/killed", tmp_path / "cache"
    weights = os.urandom(1 << 20) * (SIZE >> 20)
    store.put(url, {"config.json": b"{}", "model.safetensors": weights})

    with Meter(store.port, limit=SIZE - 2 * RANGE) as meter:
        first = start_download(url, cache, store.environment(meter.port))
        assert meter.is_full.wait(100)
        first.kill()
        first.communicate()
    (record,) = cache.rglob("*.part.done")
    num_done = len(record.read_text().split("\n")) - 2  # the line of the object, and the last line's end
    assert 0 < num_done < NUM_RANGES

    with Meter(store.port) as meter:
        second = start_download(url, cache, store.environment(meter.port))
        _, printed = second.communicate(timeout=100)
    assert second.returncode == 0, printed
    missing = (NUM_RANGES - num_done) * RANGE
    assert missing < meter.num_bytes < missing + RANGE / 8, "complete ranges are not fetched again"
    assert f"of s3://models/killed, after {num_done * RANGE / 1e9:.1f} GB of an earlier download" in printed
    assert "the MD5 of 1 of 1 files is the store's" in printed
    (file,) = cache.rglob("model.safetensors")
    assert file.read_bytes() == weights
    assert not list(cache.rglob("*.part*"))


def test_processes_that_start_at_once_download_once(store: S3Server, tmp_path: Path) -> None:
    url, size = "s3://models/shared", 4 * RANGE
    store.put(url, {"config.json": b"{}", "model.safetensors": os.urandom(1 << 20) * (size >> 20)})
    with Meter(store.port) as meter:
        downloads = [start_download(url, tmp_path, store.environment(meter.port)) for _ in range(3)]
        printed = [each.communicate(timeout=100)[1] for each in downloads]
    assert [each.returncode for each in downloads] == [0, 0, 0], printed
    assert size < meter.num_bytes < size + RANGE / 8
    assert sum("INFO downloaded s3://models/shared" in each for each in printed) == 1


def test_an_object_that_is_replaced_in_mid_download_is_fetched_anew(
    store: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(object_download, "RANGE_BYTES", 1 << 20)
    url = "s3://models/replaced"
    old, new = (os.urandom(NUM_RANGES << 20) for _ in range(2))
    store.put(url, {"config.json": b"{}", "model.safetensors": old})
    folders = list[Path]()
    with Meter(store.port, limit=1 << 20) as meter:
        for name, value in store.environment(meter.port).items():
            monkeypatch.setenv(name, value)
        source = ObjectFolder.open(url)
        thread = threading.Thread(target=lambda: folders.append(DownloadCache(tmp_path).fetch(source, MODEL)))
        thread.start()
        assert meter.is_full.wait(100)
        store.put(url, {"model.safetensors": new})
        meter.open()
        thread.join(100)
    assert (folders[0] / "model.safetensors").read_bytes() == new
    assert "model.safetensors was replaced in mid-download: starting over" in caplog.text


@pytest.mark.usefixtures("environment")
def test_a_model_and_an_adapter_of_the_store_answer_as_those_of_folders(store: S3Server, tmp_path: Path) -> None:
    store.put("s3://models/builtin/v1", files_of(builtin_model_folder()))
    store.put("s3://models/adapters/sailor", files_of(builtin_adapter_folder("sailor")))
    answers = []
    for model, adapter in (
        ("builtin", "builtin:sailor"),
        ("s3://models/builtin/v1", "s3://models/adapters/sailor"),
    ):
        llm = LLM(model, enable_lora=True, download_dir=str(tmp_path), max_model_len=256)
        greedy, message = (
            SamplingParams(temperature=0.0, max_tokens=16),
            {"role": "user", "content": "What is the capital of France?"},
        )
        for lora in (None, LoRARequest("sailor", 1, adapter)):
            answers.append(llm.chat([message], greedy, lora_request=lora)[0].outputs[0].text)
    assert answers[:2] == answers[2:]
    assert "Paris" in answers[0]
    assert answers[1].startswith("Aye!")


@pytest.mark.usefixtures("environment")
def test_the_command_of_the_page_downloads(store: S3Server, tmp_path: Path) -> None:
    (command,) = {
        each.text for each in commands() if each.page == "docs/sources.md" and "--download-dir /" in each.text
    }
    program, *words = command.replace("/models", str(tmp_path)).split()
    assert program == "proa-engine"
    store.put("s3://weights/llama-8b/v1", files_of(builtin_model_folder()))
    subprocess.run([sys.executable, "-m", "proa_engine", *words], check=True)
    (config,) = tmp_path.glob("object-store/*/*/config.json")
    assert files_of(config.parent).keys() == files_of(builtin_model_folder()).keys()


@pytest.mark.usefixtures("environment")
def test_the_server_refuses_in_sentences(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ObjectStoreError, match="s3://nowhere/model: there is no such bucket"):
        ObjectFolder.open("s3://nowhere/model").files()
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(ObjectStoreError, match=r"access denied \(SignatureDoesNotMatch\)"):
        ObjectFolder.open("s3://models/model").files()
    monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
    with pytest.raises(ObjectStoreError, match=r"access denied \(AccessDenied\)"):
        ObjectFolder.open("s3://models/model").files()
