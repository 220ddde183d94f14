"""`proa run-batch`: what it serves with, and what it refuses before the model is loaded."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from proa_cli import run_batch
from proa_cli.main import main


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The flags that the servers get, then the command."""
    started: list[list[str]] = []

    def start(words: Sequence[str], make_command: Callable[[str], Sequence[str]]) -> int:
        started.extend([list(words), list(make_command("http://h:1"))])
        return 0

    monkeypatch.setattr(run_batch, "start", start)
    return started


def files(folder: Path) -> list[str]:
    (folder / "in.jsonl").touch()
    return ["-i", str(folder / "in.jsonl"), "-o", str(folder / "out.jsonl")]


def test_flags_of_serve_go_to_the_servers(tmp_path: Path, started: list[list[str]]) -> None:
    words = [
        "run-batch",
        *files(tmp_path),
        "--model",
        "/m",
        "-tp",
        "2",
        "--reasoning-parser=qwen3",
        "--max-concurrency=9",
    ]
    assert main([*words, "--max-concurrency=9"]) == 0
    serve, batch = started
    assert serve == ["/m", "-tp", "2", "--reasoning-parser=qwen3", "--host=127.0.0.1", "--port=0"]
    assert batch[-5:] == [
        "run-batch",
        f"--input-file={tmp_path}/in.jsonl",
        f"--output-file={tmp_path}/out.jsonl",
        "--max-concurrency=9",
        "--url=http://h:1",
    ]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--url=http://h:1"], "--url: a running gateway is asked with `proa-gateway run-batch`"),
        (["--port=1"], "--port: only the batch has access to the gateway"),
        (["--max-concurrency=0"], "--max-concurrency must be at least 1, got 0"),
        (["-i", "/missing"], "No such file or directory: '/missing'"),
        (["-o", __file__], "line 1 is not the output of a batch"),
    ],
)
def test_what_cannot_be_run_is_refused(
    words: list[str], reason: str, tmp_path: Path, started: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["run-batch", *files(tmp_path), "--model=m", *words])
    printed = capsys.readouterr().err
    assert printed.startswith("proa run-batch: error: ")
    assert printed.endswith(f"{reason}\n")
    assert not started
