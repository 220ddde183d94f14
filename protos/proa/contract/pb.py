"""Conversion between the contract's dataclasses and protobuf messages, by the names of their fields.

A field that is unset in the message (or the zero of an enum) becomes None if its type allows that, else the
dataclass's default. None is not sent, nor are fields with the metadata `wire=False`.

A field of `bytes` stays as it is. Columns of many token ids are `bytes` in the message, little-endian uint32: as a
repeated field, 131,000 ids take 5.5 ms to parse instead of 0.04.
"""

import sys
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from proa.contract.request import HASH_BYTES

T = TypeVar("T")
M = TypeVar("M", bound=Message)


def to_pb(message_class: type[M], value: object) -> M:
    """The dataclass instance as a message."""
    message = message_class()
    write_pb(value, message)
    return message


def write_pb(value: object, message: Message) -> None:
    """Write the dataclass instance into an empty message. A nested message is written in place, not copied."""
    _writer(type(value), type(message))(value, message)  # type: ignore[arg-type]  # classes are hashable


def from_pb(cls: type[T], message: Message) -> T:
    """The message as an instance of the dataclass `cls`. Raises `ValueError` for what that refuses."""
    value: T = _reader(cls, type(message))(message)  # type: ignore[arg-type]  # classes are hashable
    return value


def token_ids_to_pb(token_ids: Iterable[int]) -> bytes:
    column = token_ids if isinstance(token_ids, array) else array("I", token_ids)
    if sys.byteorder == "big":
        column = array("I", column)
        column.byteswap()
    return column.tobytes()


def token_ids_from_pb(name: str, data: bytes) -> list[int]:
    """`name` is that of the field, for the error. Raises `ValueError`."""
    if len(data) % 4:
        raise ValueError(f"{name} must be little-endian uint32, so a multiple of 4 bytes, not {len(data)}")
    column = array("I", data)
    if sys.byteorder == "big":
        column.byteswap()
    return column.tolist()


def _hashes_from_pb(name: str, data: bytes) -> list[bytes]:
    return [data[start : start + HASH_BYTES] for start in range(0, len(data), HASH_BYTES)]


# Each class gets the functions that one would write by hand, such as `lambda message: cls(handle=message.handle, ...)`.
# A loop over the fields takes twice as long, and some of these messages come with every token.


@cache
def _writer(cls: type, message_class: type[Any]) -> Callable[[Any, Any], None]:
    """A function that writes a value into an empty message."""
    if not is_dataclass(cls):  # a list of lists, whose inner ones are messages with one field
        (inner,) = message_class.DESCRIPTOR.fields
        return lambda value, message: getattr(message, inner.name).extend(value)
    names: dict[str, Any] = {"token_ids": token_ids_to_pb, "hashes": b"".join}
    lines = ["def function(value, message):", "pass"]
    for field in _wire_fields(cls, message_class):
        value, target, write = f"value.{field.name}", f"message.{field.name}", f"write_{field.name}"
        if field.is_raw:
            line = f"if {value}: {target} = {value}"
        elif field.is_bytes:
            line = f"{target} = {field.column}({value})"
        elif field.is_map:
            line = f"if {value}: {target}.update({value})"
        elif field.message_class is not None:
            names[write] = _writer(field.element, field.message_class)
            if field.is_repeated:
                line = f"for each in {value}: {write}(each, {target}.add())"
            else:
                line = f"if {value} is not None: {target}.SetInParent(); {write}({value}, {target})"
        elif field.is_repeated:
            line = f"if {value}: {target}.extend({value})"
        elif field.has_presence:
            line = f"if {value} is not None: {target} = {value}"
        else:
            line = f"if {value}: {target} = {value}"  # a zero is not sent
        lines.append(line)
    exec("\n ".join(lines), names)
    function: Callable[[Any, Any], None] = names["function"]
    return function


@cache
def _reader(cls: type, message_class: type[Any]) -> Callable[[Any], Any]:
    if not is_dataclass(cls):
        (inner,) = message_class.DESCRIPTOR.fields
        return lambda message: tuple(getattr(message, inner.name))
    names: dict[str, Any] = {"make": cls, "token_ids": token_ids_from_pb, "hashes": _hashes_from_pb}
    arguments = []
    for field in _wire_fields(cls, message_class):
        value, convert = f"message.{field.name}", f"convert_{field.name}"
        if field.is_bytes and not field.is_raw:
            value = f"{field.column}({field.name!r}, {value})"
        elif field.is_map:
            value = f"dict({value})"
        elif field.message_class is not None:
            names[convert] = _reader(field.element, field.message_class)
            value = f"{field.container}(map({convert}, {value}))" if field.is_repeated else f"{convert}({value})"
        elif field.is_enum and field.is_repeated:
            names[convert] = _Members({int(member): member for member in field.element}).__getitem__
            value = f"{field.container}(map({convert}, {value}))"
        elif field.is_repeated:
            value = f"{field.container}({value})"
        elif field.is_enum:
            names[convert] = _Members({0: field.unset} | {int(member): member for member in field.element})
            value = f"{convert}[{value}]"
        if field.may_be_unset:
            names[f"unset_{field.name}"] = field.unset
            value = f"{value} if message.HasField({field.name!r}) else unset_{field.name}"
        arguments.append(f"{field.name}={value}")
    return _compile("message", arguments, names)


def _compile(argument: str, arguments: list[str], names: dict[str, Any]) -> Callable[[Any], Any]:
    function: Callable[[Any], Any] = eval(f"lambda {argument}: make({', '.join(arguments)})", names)
    return function


class _Members(dict[int, Any]):
    """An enum's members by number. A number that this version does not know stands for itself."""

    def __missing__(self, number: int) -> int:
        return number


class _WireField:
    """What the dataclass and the message say about a field."""

    def __init__(self, name: str, hint: Any, default: Any, descriptor: FieldDescriptor) -> None:
        optional = type(None) in get_args(hint)
        if optional:
            (hint,) = (member for member in get_args(hint) if member is not type(None))
        message = descriptor.message_type
        self.name = name
        self.element = get_args(hint)[0] if get_args(hint) else hint
        self.container = "tuple" if get_origin(hint) is tuple else "list"
        self.column = "hashes" if self.element is bytes else "token_ids"
        self.is_raw = hint is bytes
        self.is_bytes = descriptor.type == FieldDescriptor.TYPE_BYTES
        self.is_enum = descriptor.enum_type is not None
        self.is_repeated = descriptor.is_repeated
        self.is_map = message is not None and message.GetOptions().map_entry
        self.message_class: Any = None if message is None or self.is_map else GetMessageClass(message)
        self.has_presence = descriptor.has_presence
        self.unset = None if optional else default
        has_default = default is not MISSING and default != descriptor.default_value
        self.may_be_unset = self.has_presence and (optional or has_default)


def _wire_fields(cls: type, message_class: type[Any]) -> Iterator[_WireField]:
    hints, descriptors = get_type_hints(cls), message_class.DESCRIPTOR.fields_by_name
    for field in fields(cls):
        if field.metadata.get("wire", True):
            yield _WireField(field.name, hints[field.name], field.default, descriptors[field.name])
