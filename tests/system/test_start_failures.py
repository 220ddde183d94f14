"""An engine that cannot start ends within seconds, whichever way it is started, and its last line is the reason."""

import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from proa_engine import LLM
from proa_engine.builtin import builtin_model_folder
from support.processes import free_port

# A start that cannot work takes about a second, of which a loaded machine may make many.
MAX_SECONDS = 30.0


def pointer(root: Path) -> Path:
    """The built-in model as `git clone` without Git LFS leaves it."""
    folder = shutil.copytree(builtin_model_folder(), root / "pointer")
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    return folder


def run(*words: str) -> tuple[list[str], float]:
    """Start a program that must fail. Returns the lines of stderr and the seconds that it took."""
    started = time.monotonic()
    done = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1, done.stderr
    return done.stderr.splitlines(), time.monotonic() - started


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ("--model=/nowhere/model", "model folder /nowhere/model does not exist: / has no nowhere"),
        ("--model=s3://bucket/model --revision=v2", "revision v2: s3://bucket/model has no revisions; give each"),
        (
            "--model=builtin --host=192.0.2.1",
            "cannot serve gRPC on 192.0.2.1:{port} (--port): 192.0.2.1 is not an addr",
        ),
        (
            "--model=builtin --health-port={taken}",
            "cannot serve health on {host}:{taken} (--health-port): another prog",
        ),
    ],
)
def test_the_engine_ends_with_the_reason(options: str, reason: str) -> None:
    port, host = free_port(), "127.0.0.1"
    with socket.create_server((host, 0)) as other:
        names = {"port": port, "taken": other.getsockname()[1], "host": host}
        words = [word.format(**names) for word in options.split()]
        lines, seconds = run("proa_engine", "serve", f"--host={host}", f"--port={port}", "--metrics-port=0", *words)

    assert lines[-1].startswith(f"proa-engine: error: {reason.format(**names)}")
    assert seconds < MAX_SECONDS


def test_the_engine_beside_a_gateway_and_the_engine_in_this_process_fail_alike(tmp_path: Path) -> None:
    folder = pointer(tmp_path)
    reason = f"{folder / 'model.safetensors'} is a pointer of Git LFS, not the file itself; get the files with"

    lines, seconds = run("proa_cli", "serve", str(folder), f"--port={free_port()}")

    assert lines[-1].startswith(f"proa serve: error: {reason}")
    assert seconds < MAX_SECONDS
    with pytest.raises(ValueError, match=f"^{reason}"):
        LLM(str(folder))
