"""The contract's comments: each gives the meaning of its field when unset."""

import re
from pathlib import Path

import pytest
from google.protobuf.descriptor import FileDescriptor

from proa.engine.v1 import core_pb2, service_pb2

PROTOS = Path(__file__).parents[3] / "protos"
FIELD = re.compile(r"(?:optional |repeated )?(?:map<\w+, \w+>|\w+) (\w+) = \d+;")
SAYS_WHAT_UNSET_MEANS = re.compile(r"\b(unset|empty|zero|unspecified|default|always set)\b", re.IGNORECASE)


def comments(file: FileDescriptor) -> list[tuple[str, str]]:
    """Names of the messages' fields and the comments above them, without oneofs: what one does not say is not set."""
    found, comment = [], ""
    messages = re.sub(r"oneof .*?\}|enum .*?\}", "", (PROTOS / file.name).read_text(), flags=re.DOTALL)
    for line in map(str.strip, messages.splitlines()):
        if line.startswith("//"):
            comment += line.removeprefix("//")
            continue
        if field := FIELD.fullmatch(line):
            found.append((field[1], comment.strip()))
        comment = ""
    return found


def fields(file: FileDescriptor) -> list[str]:
    """The same names, as the generated code has them; an optional field is a oneof of its own there."""
    return [
        field.name
        for message in file.message_types_by_name.values()
        for field in message.fields
        if field.containing_oneof is None or field.containing_oneof.name == f"_{field.name}"
    ]


@pytest.mark.parametrize("file", [core_pb2.DESCRIPTOR, service_pb2.DESCRIPTOR], ids=["core", "service"])
def test_every_field_says_what_it_means_when_it_is_not_set(file: FileDescriptor) -> None:
    commented = comments(file)
    assert [name for name, _ in commented] == fields(file)
    for name, comment in commented:
        assert re.match(rf"{name}\b", comment), f"the comment of {name} must begin with its name: {comment!r}"
        assert SAYS_WHAT_UNSET_MEANS.search(comment), f"{name} says nothing of unset, empty or zero: {comment!r}"
