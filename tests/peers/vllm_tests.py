"""Run vLLM's own server tests against Proa: `PYTHONPATH=tests python tests/peers/vllm_tests.py vllm-0.33.0.tar.gz`.

The file is vLLM's source package from the Python package index (`pip download --no-binary :all:` or a browser); its
tests are unpacked into a temporary folder. Of them run those that speak HTTP to a server of text: neither audio, images
and video, nor a particular GPU. Each starts an engine with the built-in model under the name that it asks for, and a
gateway. Prints each test's outcome and the error of those that fail.
"""

import argparse
import base64
import inspect
import sys
import tarfile
import tempfile
from pathlib import Path

import huggingface_hub
import pytest
import transformers
from peers import model, vllm_pooling
from peers.foreign_tests import INSIDE, OPTIONS, ChosenTests, run_in
from peers.stubs import install_stubs

FOLDERS = ("anthropic", "generate", "openai", "pooling", "serve", "tool_parsers")
# Words in the names of files, tests and their parameters: what needs another kind of model, a GPU, or a feature that
# Proa does not have on purpose (docs/openai-fields.md: refused).
NOT_FOR_PROA = ("vision", "vlm", "audio", "image", "embeds", "multimodal", "tensorizer", "watermarking", "sagemaker",
                "lmeval", "mteb", "offline", "uds", "rpc", "render", "joint", "mcp", "harmony", "orca",
                "profile")  # fmt: skip
UTILS = """from peers.server import RemoteOpenAIServer
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
        return run_in(Path(folder), "peers.vllm_tests", pytest_arguments)


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


def _is_for_proa(item: pytest.Item) -> bool:
    return isinstance(item, pytest.Function) and not _is_not_for_proa(item.name) and _starts_a_server(item)


def _starts_a_server(item: pytest.Function) -> bool:
    definitions = [definition for found in item._fixtureinfo.name2fixturedefs.values() for definition in found]
    functions = [item.function, *(definition.func for definition in definitions)]
    return any("RemoteOpenAIServer(" in inspect.getsource(function) for function in functions)


def run_inside(arguments: list[str]) -> int:
    """Run the unpacked tests, which are in the current folder."""
    model.write_model()
    transformers.AutoTokenizer.from_pretrained = model.load_tokenizer  # type: ignore[method-assign]
    transformers.AutoModel.from_pretrained = model.load_decoder  # type: ignore[assignment, method-assign]
    huggingface_hub.snapshot_download = lambda *_, **__: str(model.FOLDER)  # type: ignore[assignment]
    sys.modules["pybase64"] = base64
    install_stubs(
        ["vllm", "rapidfuzz", "openai_harmony", "gpt_oss", "PIL"],
        {
            "vllm.tokenizers": {"get_tokenizer": model.load_tokenizer},
            "vllm.entrypoints.pooling.utils": vars(vllm_pooling),
            "vllm.entrypoints.pooling.scoring.utils": vars(vllm_pooling),
            "vllm.utils.serial_utils": vars(vllm_pooling),
            "vllm.config": {"ModelConfig": model.ModelConfig},
            "vllm.transformers_utils.repo_utils": {"hf_api": model.Hub},
            "vllm.model_executor.model_loader.weight_utils": {
                "download_weights_from_hf": lambda *_, **__: str(model.FOLDER)
            },
        },
    )
    options = [*OPTIONS, "-o", "asyncio_mode=auto"]
    return pytest.main([*options, *(arguments or ["tests/entrypoints"])], plugins=[ChosenTests(_is_for_proa)])


if __name__ == "__main__":
    sys.exit(run_inside(sys.argv[2:]) if sys.argv[1:2] == [INSIDE] else main())
