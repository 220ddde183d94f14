"""The engine uses no name of PyTorch that the oldest version it allows lacks: here the newest is installed."""

import ast
from collections.abc import Iterator
from pathlib import Path

ENGINE = Path(__file__).parents[2] / "engine"
ALLOWED = '"torch>=2.11,<2.14"'
# What PyTorch 2.13 has and 2.11 lacks: public names of the modules that the engine imports, and methods.
NEWER = {
    "torch.accelerator.Graph",
    "torch.accelerator.empty_host_cache",
    "torch.accelerator.graphs",
    "torch.backends.cuda.blas_workspace_size",
    "torch.backends.cuda.cublas_workspace_size",
    "torch.backends.cuda.cublaslt_workspace_size",
    "torch.cuda.caching_allocator_disabled",
    "torch.cuda.current_solver_handle",
    "torch.cuda.memory.caching_allocator_disabled",
    "torch.cuda.platform",
    "torch.distributed.all_gather_single",
    "torch.distributed.record_comm",
    "torch.distributed.reduce_scatter_single",
    "torch.nn.LinearCrossEntropyLoss",
    "torch.nn.functional.linear_cross_entropy",
    "torch.random.thread_safe_generator",
    "torch.thread_safe_generator",
}
NEWER_METHODS = {
    "begin_capture_to_if_node",
    "const_data_ptr",
    "end_capture_to_conditional_node",
    "get_currently_capturing_graph",
    "get_graph_data",
    "is_capturing",
}


def names(path: Path) -> Iterator[str]:
    """All that a file imports, and all names with dots, from what the first of them was imported as."""
    tree = ast.parse(path.read_text())
    imported: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom):
            imported |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    yield from imported.values()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            first, _, others = ast.unparse(node).partition(".")
            yield f"{imported.get(first, first)}.{others}"


def test_the_oldest_pytorch_has_every_name() -> None:
    assert ALLOWED in (ENGINE / "pyproject.toml").read_text(), "list anew what the oldest version lacks"
    for path in (ENGINE / "proa_engine").rglob("*.py"):
        for name in names(path):
            assert name not in NEWER, path
            assert name.rpartition(".")[2] not in NEWER_METHODS, path
