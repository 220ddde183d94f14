"""Releases: `scripts/check-release` finds what must not be published, `scripts/set-version` leaves nothing for it to
find, `scripts/images` lists what it has built.
"""

import io
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
from collections.abc import Mapping
from pathlib import Path
from zipfile import ZipFile

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PROJECTS = ("protos", "engine", "services/gateway", "services/cli")
README = "A package. " * 20
REQUIRED = {
    "proa": ("proa-protos==1.0.0", "proa-engine==1.0.0", "pyyaml>=6"),
    "proa-engine": ("proa-protos==1.0.0", "torch<3,>=2", 'triton<4,>=3; sys_platform == "linux"'),
    "proa-gateway": ("proa-protos==1.0.0",),
    "proa-protos": (),
}


def metadata(name: str, *, version: str = "1.0.0", required: Mapping[str, tuple[str, ...]] = REQUIRED) -> str:
    requires = "".join(f"Requires-Dist: {each}\n" for each in required[name])
    fields = f"Name: {name}\nVersion: {version}\n{requires}Description-Content-Type: text/markdown\n"
    return f"Metadata-Version: 2.4\n{fields}\n{README}"


def write_archive(path: Path, files: Mapping[str, str]) -> None:
    with tarfile.open(path, "w:gz") as archive:
        for name, text in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text.encode()))


def write_package(folder: Path, name: str, text: str, *others: str) -> None:
    """A wheel and a source archive with this metadata. `others`: names of further files."""
    stem = f"{name.replace('-', '_')}-1.0.0"
    files = dict.fromkeys((f"{stem}.dist-info/licenses/LICENSE", "package/py.typed", *others), "")
    with ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as wheel:
        for each, content in (files | {f"{stem}.dist-info/METADATA": text}).items():
            wheel.writestr(each, content)
    files = dict.fromkeys((f"{stem}/LICENSE", f"{stem}/package/py.typed"), "")
    write_archive(folder / f"{stem}.tar.gz", files | {f"{stem}/PKG-INFO": text})


def write_chart(folder: Path, version: str = "1.0.0") -> None:
    text = f"name: proa\nversion: {version}\nappVersion: 1.0.0\n"
    write_archive(folder / f"proa-{version}.tgz", {"proa/Chart.yaml": text})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A release without faults."""
    for name in REQUIRED:
        write_package(tmp_path, name, metadata(name))
    write_chart(tmp_path)
    return tmp_path


def check(folder: Path) -> list[str]:
    """The faults that are found."""
    command = [sys.executable, str(ROOT / "scripts/check-release"), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == (1 if done.stderr else 0), done.stderr
    return [line.removeprefix("release: ") for line in done.stderr.splitlines()]


def test_a_release_without_faults_passes(folder: Path) -> None:
    assert check(folder) == []


def test_all_faults_are_named(folder: Path) -> None:
    others = {"proa-engine": ("proa-protos>=1.0.0", "torch>=2")}
    write_package(folder, "proa-engine", metadata("proa-engine", required=others), "package/a.pyc")
    write_package(folder, "proa-gateway", metadata("proa-gateway", version="0.9.0").replace(README, ""))
    shutil.move(folder / "proa-1.0.0.tar.gz", folder / "other.tar.gz")
    (folder / "proa-1.0.0.tgz").unlink()
    engine, gateway = "proa_engine-1.0.0-py3-none-any.whl", "proa_gateway-1.0.0-py3-none-any.whl"
    faults = set(check(folder))
    assert faults >= {
        "proa has 1 wheels and 0 source archives",
        f"{engine}: package/a.pyc is compiled",
        f"{engine}: proa-protos>=1.0.0 is not ==1.0.0",
        f"{engine}: torch has no bounds",
        f"{engine}: triton has no bounds",
        f"{gateway}: the metadata has no README",
        f"{gateway}: proa-protos==1.0.0 is not ==0.9.0",
        "there are 0 charts",
        "packages and chart have different versions: 0.9.0, 1.0.0",
    }


def test_a_chart_of_another_version_is_named(folder: Path) -> None:
    (folder / "proa-1.0.0.tgz").unlink()
    write_chart(folder, "1.1.0")
    assert check(folder) == ["packages and chart have different versions: 1.0.0, 1.1.0"]


def test_a_new_version_is_written_everywhere(tmp_path: Path) -> None:
    files = [*(f"{each}/pyproject.toml" for each in PROJECTS), "charts/proa/Chart.yaml"]
    for file in (*files, "scripts/set-version"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, tmp_path / file)
    subprocess.run([tmp_path / "scripts/set-version", "9.8.7"], timeout=60, check=True)
    for project in PROJECTS:
        package = tomllib.loads((tmp_path / project / "pyproject.toml").read_text())["project"]
        ours = [each for each in package["dependencies"] if each.startswith("proa")]
        assert {package["version"], *(each.partition("==")[2] for each in ours)} == {"9.8.7"}
    chart = yaml.safe_load((tmp_path / "charts/proa/Chart.yaml").read_text())
    assert (chart["version"], chart["appVersion"]) == ("9.8.7", "9.8.7")


def test_ids_of_images_are_those_that_the_builder_writes(tmp_path: Path) -> None:
    """Not those that it lists: it lists an image once for each of its names."""
    builder, ids = tmp_path / "builder", tmp_path / "images.txt"
    builder.write_text('#!/bin/bash\nwhile [ "$1" != --iidfile ]; do shift; done\nprintf sha256:abc > "$2"\n')
    builder.chmod(0o755)
    environment = {"PATH": os.environ["PATH"], "BUILDER": str(builder), "IDS": str(ids), "TAG": "1.0.0"}
    subprocess.run([ROOT / "scripts" / "images"], check=True, capture_output=True, env=environment)
    assert ids.read_text().splitlines() == [
        f"localhost/proa-{service}:1.0.0 sha256:abc" for service in ("gateway", "engine")
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["builder", "images.txt"]
