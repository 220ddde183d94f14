"""Stand-ins for the modules of a server that its tests import, so that they run where the server is not installed.

The tests speak HTTP; of the server itself they use classes that parse answers, exceptions and helpers around them.
"""

import sys
from collections.abc import Collection, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any


class _StubType(type):
    """Classes of which every attribute exists, and that take type parameters."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _make_class(name)

    def __getitem__(cls, parameters: object) -> Any:
        return cls


class Stub(metaclass=_StubType):
    """Accepts any arguments; any attribute, call and item of it is another one."""

    def __init__(self, *arguments: object, **named: object) -> None: ...

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Stub()

    def __call__(self, *arguments: object, **named: object) -> Any:
        return Stub()

    def __getitem__(self, key: object) -> Any:
        return Stub()

    def __iter__(self) -> Any:
        """A test that loops over what only the server has fails; over nothing it would pass."""
        raise TypeError("a stand-in for a part of the server has no items")

    def __bool__(self) -> bool:  # `current_platform.is_rocm()` and its like
        return False

    @classmethod
    def model_validate(cls, value: object, **named: object) -> Any:
        """A JSON value with its members as attributes."""
        return _namespace(value)


class _Members(SimpleNamespace):
    """Those of a JSON object, as attributes."""

    def model_dump(self, *, exclude: Collection[str] = ()) -> dict[str, object]:
        return {name: value for name, value in vars(self).items() if name not in exclude}


def _namespace(value: object) -> object:
    if isinstance(value, dict):
        return _Members(**{str(name): _namespace(member) for name, member in value.items()})
    return [_namespace(member) for member in value] if isinstance(value, list) else value


def _make_class(name: str) -> type:
    if name.endswith(("Error", "Exception")):
        return type(name, (Exception,), {})
    return _StubType(name, (Stub,), {})


class _StubModule(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = Stub() if name.islower() or name.isupper() else _make_class(name)
        setattr(self, name, value)
        return value


class _StubFinder(MetaPathFinder, Loader):
    def __init__(self, packages: Sequence[str], attributes: dict[str, dict[str, object]]) -> None:
        self._packages = frozenset(packages)
        self._attributes = attributes

    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        is_stub = name.split(".")[0] in self._packages and not path
        return ModuleSpec(name, self, is_package=True) if is_stub else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StubModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        vars(module).update(self._attributes.get(module.__name__, {}))


def install_stubs(packages: Sequence[str], attributes: dict[str, dict[str, object]]) -> None:
    """Import stubs for all modules of `packages`. `attributes`: what a module has, by the module's name; one with a
    `__path__` has the real modules of these folders."""
    sys.meta_path.insert(0, _StubFinder(packages, attributes))
