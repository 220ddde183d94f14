"""Import rules about single files. Those between packages are import-linter's (pyproject.toml)."""

import ast
import sys
from functools import cache
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).parents[2]
ENGINE = ROOT / "engine" / "proa_engine"
GATEWAY = ROOT / "services" / "gateway" / "proa_gateway"
PROTOS = ROOT / "protos" / "proa"

CONVERT = [ENGINE / "server/convert.py", GATEWAY / "engines/convert.py"]
MESSAGES = [*CONVERT, ENGINE / "server/servicer.py"]

# What is imported by a name that the code computes, which the graph of import statements lacks.
BY_NAME = {
    "proa_engine.models.registry": (
        "proa_engine.models.decoder",
        "proa_engine.models.families.llama",
        "proa_engine.models.transformers_adapter.model",
    ),
}

# what -> the only files that may import it
ONLY = {
    "proa.engine.v1": [ENGINE / "server", GATEWAY / "engines/convert.py"],
    "proa.engine.v1.core_pb2": MESSAGES,
    "proa.engine.v1.service_pb2": MESSAGES,
    "proa.contract.pb": CONVERT,
    "google.protobuf": [PROTOS / "contract/pb.py", ENGINE / "server/convert.py"],
    "grpc": [
        ENGINE / "server",
        *(GATEWAY / "engines" / name for name in ("convert.py", "session.py", "client.py", "discovery.py")),
        GATEWAY / "scaler",
    ],
    "PIL": [PROTOS / "image"],
    "llguidance": [PROTOS / "grammar", ENGINE / "grammar"],
    "aiohttp": [GATEWAY / "batch/run.py", GATEWAY / "images/fetch.py"],
    "kubernetes": [GATEWAY / "engines/discovery.py"],
    "opentelemetry.sdk": [
        PROTOS / "telemetry.py",
        *(ENGINE / "observability" / name for name in ("telemetry.py", "worker_spans.py")),
        GATEWAY / "observability/telemetry.py",
    ],
    "transformers": [ENGINE / "models/transformers_adapter"],
    "opentelemetry.exporter": [PROTOS / "telemetry.py"],
}


@cache
def imports(path: Path) -> frozenset[str]:
    """Every module that a file names, wherever in it: `from a import b` is both a and a.b."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return frozenset(names)


def files() -> list[Path]:
    """All but the generated code."""
    found = [
        *PROTOS.glob("*.py"),
        *PROTOS.glob("contract/*.py"),
        *PROTOS.glob("grammar/*.py"),
        *PROTOS.glob("image/*.py"),
        *ENGINE.rglob("*.py"),
        *GATEWAY.rglob("*.py"),
    ]
    return [path for path in found if "_pb2" not in path.name]


@pytest.mark.parametrize("module", ONLY)
def test_only_its_own_files_import(module: str) -> None:
    importers = {path for path in files() if any(f"{name}.".startswith(f"{module}.") for name in imports(path))}
    strangers = {path for path in importers if not any(path.is_relative_to(allowed) for allowed in ONLY[module])}
    assert not strangers, f"{module} is imported by {sorted(str(path.relative_to(ROOT)) for path in strangers)}"


def test_core_and_contract_import_the_standard_library_only() -> None:
    """The core also imports the contract's dataclasses."""
    contract = [path for path in PROTOS.glob("contract/*.py") if path.name != "pb.py"]
    for path in [*contract, *ENGINE.glob("core/**/*.py")]:
        ours = ("proa.contract.", "proa_engine.core.") if path.is_relative_to(ENGINE) else ("proa.contract.",)
        for name in imports(path):
            known = name.partition(".")[0] in sys.stdlib_module_names or name.startswith(ours)
            assert known, f"{path.name} imports {name}"


def test_no_package_of_the_engine_has_circles_with_what_is_imported_by_name() -> None:
    """The architectures of `models/registry.py` among them."""
    graph = grimp.build_graph("proa_engine", cache_dir=None)
    for importer, names in BY_NAME.items():
        for imported in names:
            graph.add_import(importer=importer, imported=imported)
    packages = sorted({module.rpartition(".")[0] for module in graph.modules} - {""})
    assert len(packages) > 20
    assert {package: found for package in packages if (found := graph.nominate_cycle_breakers(package))} == {}
