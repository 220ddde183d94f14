"""Run SGLang's own server tests against Proa: `PYTHONPATH=tests python tests/peers/sglang_tests.py sglang`.

The folder is a checkout of SGLang's repository (https://github.com/sgl-project/sglang). Of its tests of the OpenAI,
Anthropic and native endpoints run those that start a server of text. Each class gets an engine with the built-in model
under the name that it asks for, and a gateway. Prints each test's outcome and the error of those that fail.
"""

import argparse
import inspect
import shutil
import sys
import tempfile
import unittest
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from peers import model
from peers.foreign_tests import INSIDE, OPTIONS, ChosenTests, run_in
from peers.server import START_SECONDS, RemoteOpenAIServer
from peers.stubs import install_stubs

from support.processes import free_port

TESTS = Path("test/registered")
CHOSEN = ("openai_server", "constrained_decoding", "core/test_srt_endpoint.py", "sampling/test_penalty.py")
KITS = Path("python/sglang/test/kits")  # tests that several classes share
# Words in the names of files, classes and tests: what needs another server, another kind of model, SGLang itself, or a
# feature that Proa does not have on purpose (docs/openai-fields.md, docs/generate.md: refused).
NOT_FOR_PROA = ("rust", "http2", "uds", "transcription", "hidden_states", "logitprocessor", "logit_processor",
                "server_info", "clef", "watermark", "textseal", "gpt_oss", "deepseek", "conversion",
                "logprob_mixed", "large_max_new_tokens")  # fmt: skip
MODELS = {
    "DEFAULT_MODEL_NAME_FOR_TEST": "meta-llama/Llama-3.1-8B-Instruct",
    "DEFAULT_SMALL_MODEL_NAME_FOR_TEST": "meta-llama/Llama-3.2-1B-Instruct",
    "DEFAULT_SMALL_MODEL_NAME_FOR_TEST_SCORE": "Qwen/Qwen3-0.6B",
    "DEFAULT_SMALL_CROSS_ENCODER_MODEL_NAME_FOR_TEST": "a reranker",
    "DEFAULT_REASONING_MODEL_NAME_FOR_TEST": "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B",
    "DEFAULT_ENABLE_THINKING_MODEL_NAME_FOR_TEST": "Qwen/Qwen3-30B-A3B",
}
# SGLang's options by those of vLLM, which `RemoteOpenAIServer` knows.
SERVER_OPTIONS = {
    "--context-length": "--max-model-len",
    "--context-len": "--max-model-len",
    "--max-running-requests": "--max-num-seqs",
}
RERANKED = [
    {"query": "How many people live in Berlin?", "documents": ["Berlin is known for its museums."] * number}
    for number in (1, 2)
]


class Servers:
    """Starts and stops servers as SGLang's tests do."""

    def __init__(self) -> None:
        self._running: dict[int, RemoteOpenAIServer] = {}  # by port

    def start(
        self,
        model: str,
        base_url: str,
        timeout: float,
        api_key: str | None = None,
        other_args: Sequence[str] = (),
        **unused: object,
    ) -> SimpleNamespace:
        """SGLang's `popen_launch_server`. The process that it returns is known by its port."""
        arguments = [SERVER_OPTIONS.get(argument, argument) for argument in other_args]
        port = int(base_url.rpartition(":")[2])
        self._running[port] = RemoteOpenAIServer(
            model, [*arguments, *(["--api-key", api_key] if api_key else [])], port=port
        )
        return SimpleNamespace(pid=port)

    def stop(self, port: int) -> None:
        """SGLang's `kill_process_tree`."""
        self._running.pop(port).__exit__(None, None, None)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="a checkout of SGLang's repository")
    options, pytest_arguments = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        for path in (options.source / TESTS).rglob("test_*.py"):
            named = str(path.relative_to(options.source / TESTS))
            if named.startswith(CHOSEN) and not _is_not_for_proa(named):
                copy = Path(folder, "tests", named)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, copy)
        shutil.copytree(options.source / KITS, Path(folder, "kits"))
        return run_in(Path(folder), "peers.sglang_tests", pytest_arguments)


def _is_for_proa(item: pytest.Item) -> bool:
    owner = getattr(item, "cls", None)
    starts_server = owner is not None and "popen_launch_server(" in inspect.getsource(owner.setUpClass)
    return starts_server and not _is_not_for_proa(item.nodeid)


def _is_not_for_proa(name: str) -> bool:
    return any(word in name.lower() for word in NOT_FOR_PROA)


def run_inside(arguments: list[str]) -> int:
    """Run the copied tests, which are in the current folder."""
    model.write_model()
    servers = Servers()
    attributes: dict[str, dict[str, object]] = {
        "sglang.srt.utils": {"kill_process_tree": servers.stop},
        "sglang.srt.utils.hf_transformers_utils": {"get_tokenizer": model.load_tokenizer},
        "sglang.test.kits": {"__path__": ["kits"]},
        "sglang.test.runners": {"TEST_RERANK_QUERY_DOCS": RERANKED},
        "sglang.test.test_utils": MODELS
        | {
            "CustomTestCase": unittest.TestCase,
            "DEFAULT_TIMEOUT_FOR_SERVER_LAUNCH": START_SECONDS,
            "DEFAULT_URL_FOR_TEST": f"http://127.0.0.1:{free_port()}",
            "popen_launch_server": servers.start,
            "terminate_and_kill_process_tree": lambda process: servers.stop(process.pid),
        },
    }
    install_stubs(["sglang"], attributes)
    options = [*OPTIONS, "--import-mode=importlib"]
    return pytest.main([*options, *(arguments or ["tests"])], plugins=[ChosenTests(_is_for_proa)])


if __name__ == "__main__":
    sys.exit(run_inside(sys.argv[2:]) if sys.argv[1:2] == [INSIDE] else main())
