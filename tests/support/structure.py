"""What makes code large to a reader: counted in source files, for `scripts/size` and for the limits of
tests/unit/test_structure.py."""

import ast
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def files_of(*folders: Path) -> list[Path]:
    """Source files in these folders and below, but for generated ones."""
    found = (path for folder in folders for path in folder.rglob("*.py"))
    return sorted(path for path in found if "_pb2" not in path.name)


def largest_folder(package: Path) -> tuple[int, Path]:
    """How many modules the package's largest folder has, and which it is. __init__.py is none."""
    folders = {path.parent for path in files_of(package)}
    return max((sum(path.name != "__init__.py" for path in folder.glob("*.py")), folder) for folder in folders)


def large_classes(files: Iterable[Path], more_than: int) -> Iterator[str]:
    """Names of classes with more methods than so many."""
    for path in files:
        for node in ast.walk(_parsed(path)):
            if isinstance(node, ast.ClassDef):
                methods = [each for each in node.body if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef))]
                if len(methods) > more_than:
                    yield node.name


def count_none_tests(files: Iterable[Path]) -> int:
    """How often it is asked whether something is None: parts that may be missing."""
    nodes = (node for path in files for node in ast.walk(_parsed(path)) if isinstance(node, ast.Compare))
    operands = (operand for node in nodes for operand in zip(node.ops, node.comparators, strict=True))
    return sum(
        isinstance(operator, (ast.Is, ast.IsNot)) and isinstance(right, ast.Constant) and right.value is None
        for operator, right in operands
    )


def late_constants(files: Iterable[Path]) -> Iterator[str]:
    """Constants that are set below a file's first class or function, though they name nothing that it defines."""
    for path in files:
        defined: set[str] = set()
        for node in _parsed(path).body:
            if isinstance(node, _DEFINITIONS):
                defined.add(node.name)
            elif defined and isinstance(node, (ast.Assign, ast.AnnAssign)):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names = {target.id for target in targets if isinstance(target, ast.Name)}
                used = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)} - names
                if used & defined:
                    defined |= names
                elif any(name.lstrip("_").isupper() for name in names):
                    yield f"{path}:{node.lineno}"


def stray_texts(files: Iterable[Path]) -> Iterator[str]:
    """Texts that stand where documentation does, but below nothing that they could document."""
    for path in files:
        tree = _parsed(path)
        for body in (tree.body, *(node.body for node in ast.walk(tree) if isinstance(node, ast.ClassDef))):
            for before, node in pairwise(body):
                if _is_text(node) and not isinstance(before, (ast.Assign, ast.AnnAssign)):
                    yield f"{path}:{node.lineno}"


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


@cache
def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())
