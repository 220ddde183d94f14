"""The wheels of the three packages, built as pip builds them, from copies of the sources and without a network."""

import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from email.message import Message
from email.parser import HeaderParser
from pathlib import Path
from zipfile import ZipFile

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PACKAGES = {
    "proa-protos": "protos",
    "proa-gateway": "services/gateway",
    "proa-engine": "engine",
    "proa": "services/cli",
}
LEFT_OUT = ("build", "__pycache__", "*.egg-info", "*.safetensors")
BUILD = "from setuptools import build_meta; build_meta.build_wheel('dist')"


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """Folders in which the packages were built after their modules had been imported."""
    folders = {}
    for name, source in PACKAGES.items():
        folders[name] = folder = tmp_path_factory.mktemp(name) / "package"
        shutil.copytree(ROOT / source, folder, ignore=shutil.ignore_patterns(*LEFT_OUT))
        for module in folder.rglob("__init__.py"):
            compiled = module.parent / "__pycache__" / "__init__.cpython-311.pyc"
            compiled.parent.mkdir()
            compiled.write_bytes(b"compiled")
    builds = [
        subprocess.Popen([sys.executable, "-W", "ignore", "-c", BUILD], cwd=folder, stdout=subprocess.DEVNULL)
        for folder in folders.values()
    ]
    assert [build.wait(60) for build in builds] == [0] * len(PACKAGES)
    return folders


@pytest.fixture(params=PACKAGES)
def package(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def wheel(sources: Mapping[str, Path], package: str) -> ZipFile:
    (path,) = sources[package].glob("dist/*.whl")
    return ZipFile(path)


def metadata(wheel: ZipFile) -> Message:
    (name,) = (each for each in wheel.namelist() if each.endswith(".dist-info/METADATA"))
    return HeaderParser().parsestr(wheel.read(name).decode())


def test_a_wheel_has_all_modules_and_data_and_nothing_compiled(
    sources: Mapping[str, Path], package: str, wheel: ZipFile
) -> None:
    folder = sources[package]
    (top,) = (each for each in folder.iterdir() if (each / "py.typed").is_file())
    files = {str(each.relative_to(folder)) for each in top.rglob("*") if each.is_file() and each.suffix != ".pyc"}
    packed = {each for each in wheel.namelist() if ".dist-info/" not in each}
    assert packed == files


def test_the_readme_is_in_the_metadata(package: str, wheel: ZipFile) -> None:
    found = metadata(wheel)
    assert found["Description-Content-Type"].startswith("text/markdown")
    assert found.get_payload() == (ROOT / PACKAGES[package] / "README.md").read_text()


def test_the_contract_is_required_in_the_version_of_this_tree(package: str, wheel: ZipFile) -> None:
    version = tomllib.loads((ROOT / "protos" / "pyproject.toml").read_text())["project"]["version"]
    required = [each for each in metadata(wheel).get_all("Requires-Dist", []) if each.startswith("proa-")]
    others = {"proa-protos": [], "proa": ["proa-protos", "proa-engine", "proa-gateway"]}.get(package, ["proa-protos"])
    assert required == [f"{each}=={version}" for each in others]


def test_torch_and_triton_are_required_from_a_version_up_to_another(sources: Mapping[str, Path]) -> None:
    (path,) = sources["proa-engine"].glob("dist/*.whl")
    for name in ("torch", "triton"):
        (required,) = (each for each in metadata(ZipFile(path)).get_all("Requires-Dist", []) if each.startswith(name))
        assert re.match(rf"{name}(<[\d.]+,>=[\d.]+|>=[\d.]+,<[\d.]+)", required)


def test_buf_leaves_out_what_a_build_leaves(sources: Mapping[str, Path]) -> None:
    (module,) = yaml.safe_load((ROOT / "protos" / "buf.yaml").read_text())["modules"]
    copies = {each.relative_to(sources["proa-protos"]).parts[0] for each in sources["proa-protos"].rglob("*.proto")}
    assert copies - {"proa"} == set(module["excludes"])
