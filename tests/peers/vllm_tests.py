"""Run vLLM's own server tests against Proa: `python tests/peers/vllm_tests.py vllm-0.33.0.tar.gz`.

The file is vLLM's source package from the Python package index (`pip download --no-binary :all:` or a browser); its
tests are unpacked into a temporary folder. Of them run those that speak HTTP to a server of text: neither audio, images
and video, nor a particular GPU. Each starts an engine with the built-in model under the name that it asks for, and a
gateway. Prints each test's outcome and the error of those that fail.
"""

import argparse
import base64
import importlib
import inspect
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import huggingface_hub
import pytest
import transformers

FOLDERS = ("anthropic", "openai", "pooling", "serve", "tool_parsers")
# Words in the names of files, tests and their parameters: what needs another kind of model, a GPU, or a feature that
# Proa does not have on purpose (docs/openai-fields.md: refused).
NOT_FOR_PROA = ("vision", "vlm", "audio", "image", "embeds", "multimodal", "tensorizer", "watermarking", "sagemaker",
                "lmeval", "mteb", "offline", "uds", "rpc", "render", "decisions", "mcp", "harmony", "orca",
                "profile")  # fmt: skip
UTILS = """from peers.vllm_server import RemoteOpenAIServer
import pytest
VLLM_PATH, ROCM_EXTRA_ARGS, ROCM_ENV_OVERRIDES = None, [], {}
requires_fp8 = pytest.mark.skip("needs a GPU")
def multi_gpu_only(num_gpus): return requires_fp8
"""
POOLING_UTILS = "from peers.vllm_pooling import *"
CONFTEST = """import pytest
LocalAssetServer = None
class HfRunner:
    def __init__(self, *_, **__): pytest.skip("compares with the checkpoint that it names")
@pytest.fixture(scope="module")
def hf_runner(): return HfRunner
@pytest.fixture
def local_asset_server(): return None
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="vLLM's source package, vllm-VERSION.tar.gz")
    options, pytest_arguments = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        unpack(options.source, Path(folder))
        command = [sys.executable, __file__, "--inside", *pytest_arguments]
        wide = os.environ | {"COLUMNS": "250"}  # pytest cuts the errors of its summary to the terminal's width
        return subprocess.run(command, cwd=folder, env=wide, check=False).returncode


def unpack(source: Path, folder: Path) -> None:
    """Put the chosen tests into `folder`, as a package `tests` without vLLM's own helpers."""
    with tarfile.open(source) as archive:
        for member in archive:
            path = Path(*Path(member.name).parts[1:])
            if member.isfile() and path.parts[:2] == ("tests", "entrypoints") and _is_chosen(path):
                archive.extract(_renamed(member, path), folder, filter="data")
    for package in [folder / "tests", *(path for path in (folder / "tests").rglob("*") if path.is_dir())]:
        (package / "__init__.py").touch()
    (folder / "tests" / "utils.py").write_text(UTILS)
    (folder / "tests" / "conftest.py").write_text(CONFTEST)
    for name in ("models/utils.py", "models/language/pooling/embed_utils.py"):
        (folder / "tests" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "tests" / name).write_text(POOLING_UTILS)


def _is_chosen(path: Path) -> bool:
    if path.name == "conftest.py" or not path.name.startswith("test_"):
        return path.suffix == ".py"
    return path.parts[2] in FOLDERS and not _is_not_for_proa(str(path))


def _is_not_for_proa(name: str) -> bool:
    return any(word in name.lower() for word in NOT_FOR_PROA)


def _renamed(member: tarfile.TarInfo, path: Path) -> tarfile.TarInfo:
    member.name = str(path)
    return member


class ServerTests:
    """A pytest plugin that leaves only the tests for Proa that start a server, in themselves or by a fixture."""

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        chosen = [item for item in items if _is_for_proa(item)]
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = chosen


def _is_for_proa(item: pytest.Item) -> bool:
    return isinstance(item, pytest.Function) and not _is_not_for_proa(item.name) and _starts_a_server(item)


def _starts_a_server(item: pytest.Function) -> bool:
    definitions = [definition for found in item._fixtureinfo.name2fixturedefs.values() for definition in found]
    functions = [item.function, *(definition.func for definition in definitions)]
    return any("RemoteOpenAIServer(" in inspect.getsource(function) for function in functions)


def run_inside(arguments: list[str]) -> int:
    """Run the unpacked tests, which are in the current folder."""
    sys.path[:0] = [".", str(Path(__file__).parents[1])]
    vllm_model, vllm_pooling, vllm_stubs = (
        importlib.import_module(f"peers.vllm_{name}") for name in ("model", "pooling", "stubs")
    )
    vllm_model.write_model()
    transformers.AutoTokenizer.from_pretrained = vllm_model.load_tokenizer  # type: ignore[method-assign]
    transformers.AutoModel.from_pretrained = vllm_model.load_decoder  # type: ignore[method-assign]
    huggingface_hub.snapshot_download = lambda *_, **__: str(vllm_model.FOLDER)  # type: ignore[assignment]
    sys.modules["pybase64"] = base64
    vllm_stubs.install_stubs(
        ["vllm", "rapidfuzz", "openai_harmony", "gpt_oss", "PIL"],
        {
            "vllm.tokenizers": {"get_tokenizer": vllm_model.load_tokenizer},
            "vllm.entrypoints.pooling.utils": vars(vllm_pooling),
            "vllm.entrypoints.pooling.scoring.utils": vars(vllm_pooling),
            "vllm.utils.serial_utils": vars(vllm_pooling),
            "vllm.config": {"ModelConfig": vllm_model.ModelConfig},
            "vllm.transformers_utils.repo_utils": {"hf_api": vllm_model.Hub},
            "vllm.model_executor.model_loader.weight_utils": {
                "download_weights_from_hf": lambda *_, **__: str(vllm_model.FOLDER)
            },
        },
    )
    options = ["-p", "no:cacheprovider", "-q", "-rfE", "--tb=line", "-W", "ignore", "--timeout=180",
               "-o", "asyncio_mode=auto", "--rootdir=.", "--continue-on-collection-errors"]  # fmt: skip
    return pytest.main([*options, *(arguments or ["tests/entrypoints"])], plugins=[ServerTests()])


if __name__ == "__main__":
    sys.exit(run_inside(sys.argv[2:]) if sys.argv[1:2] == ["--inside"] else main())
