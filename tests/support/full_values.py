"""Dataclasses with every optional part, for tests of what renders them."""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")
_PLAIN: dict[Any, Any] = {
    bool: True,
    int: 7,
    float: float("inf"),
    str: "é\x00",
    bytes: b"\x80\xff",
    Path: Path("/folder"),
    Any: {"nan": float("nan")},
}


def full(cls: type[T]) -> T:
    """An instance whose fields all have a value that is not None, a list with an element, or a value that JSON lacks.
    It is not validated: a configuration may have parts that exclude each other."""
    instance = object.__new__(cls)
    hints = get_type_hints(cls)
    assert is_dataclass(cls)
    for each in fields(cls):
        object.__setattr__(instance, each.name, _value(hints[each.name]))
    return instance


def _value(hint: Any) -> Any:
    if hint in _PLAIN:
        return _PLAIN[hint]
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return _value(next(each for each in arguments if each is not type(None)))
    if origin is Literal:
        return arguments[-1]
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {_value(arguments[0]): _value(arguments[1])}
    if origin is not None:  # a sequence
        return (_value(arguments[0]),)
    return list(hint)[-1] if issubclass(hint, Enum) else full(hint)
