"""What only offers or records something, which never makes a request fail: tools of types that nobody runs here, and
finished calls of other servers' tools in a history.

A tool of another type is left out, and a header names its type. A record becomes text: the model then knows what
was searched or run, and cannot take it for a call that it could make itself.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, Final

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator

from proa_gateway.serving.fields import Text, check_json

UNREADABLE_COMPACTION: Final = "a compaction by another server cannot be read"
MAX_RECORD_BYTES: Final = 8 * 1024  # of its text
_OFFERED: Final = "<offered>"
# Ids that listing an item may add, and what clients move to the newest message: both would change an earlier prompt.
_NOT_SHOWN: Final = frozenset({"type", "id", "cache_control"})


class OfferedTool(BaseModel):
    """A tool of a type that is not supported, such as `web_search`. It is left out."""

    model_config = ConfigDict(extra="allow")

    type: Annotated[Text, Field(min_length=1)]

    @property
    def name(self) -> object:
        """Its name, if it has one."""
        return (self.model_extra or {}).get("name")


Offered = Annotated[OfferedTool, Tag(_OFFERED)]
"""In a union with types of tools that are supported, which have their own tags; `by_type` chooses among them."""


def by_type(tags: Mapping[str, str], default: str | None = None) -> Discriminator:
    """Choose a tool's class by its type: `tags` has those of the supported ones; the others are `Offered`. `default`:
    the type of a tool that names none; None: such a tool is an error."""

    def tag(tool: object) -> str | None:
        kind = tool.get("type") if isinstance(tool, dict) else getattr(tool, "type", None)
        if kind is None and isinstance(tool, dict | BaseModel):
            kind = default
        return tags.get(kind, _OFFERED) if isinstance(kind, str) and kind else None

    return Discriminator(tag, "invalid_type", "must be an object with a type")


def offered_fields(tools: Iterable[object]) -> dict[str, bool]:
    """The types of the tools that are left out, as paths of ignored fields."""
    return {f"tools.{tool.type}": True for tool in tools if isinstance(tool, OfferedTool)}


class Record(BaseModel):
    """A finished call of a tool that another server ran, or its result. Subclasses list the types."""

    model_config = ConfigDict(extra="allow")

    type: str
    # Fields by type that are megabytes which no model of text can read.
    _images: ClassVar[Mapping[str, str]] = {"image_generation_call": "result"}

    @model_validator(mode="before")
    @classmethod
    def _check_json(cls, value: object) -> object:
        return check_json(value)

    @property
    def text(self) -> str:
        """`[TYPE: JSON]` of what can be read in it. Empty if that is nothing."""
        hidden = {*_NOT_SHOWN, self._images.get(self.type)}
        fields = {name: value for name, value in (self.model_extra or {}).items() if name not in hidden}
        readable = _readable(fields)
        if not readable:
            return ""
        return f"[{self.type}: {_cut(json.dumps(readable, ensure_ascii=False), MAX_RECORD_BYTES - len(self.type) - 4)}]"


def _readable(value: Any) -> Any:
    """A JSON value without nulls and without what only its author, or no text model, can read. `check_json` limits how
    deeply it is nested."""
    if isinstance(value, list):
        return [_readable(entry) for entry in value if not _is_unreadable(entry)]
    if isinstance(value, dict):
        return {
            name: _readable(entry)
            for name, entry in value.items()
            if not name.startswith("encrypted_") and not _is_unreadable(entry)
        }
    return value


def _is_unreadable(value: object) -> bool:
    return value is None or (isinstance(value, str) and value.startswith("data:"))


def _cut(text: str, num_bytes: int) -> str:
    encoded = text.encode()
    if len(encoded) <= num_bytes:
        return text
    return encoded[: num_bytes - len("…".encode())].decode(errors="ignore") + "…"
