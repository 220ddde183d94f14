"""Values whose parts stand in tags too: those of objects in tags of their keys, those of arrays in tags `item`."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from proa_gateway.parsing.json_text import quoted
from proa_gateway.parsing.schema_types import Schema, allowed_types, property_schema, resolve

_ITEM = "item"
_MAX_DEPTH = 100
_EMPTY = {frozenset({"array"}): "[]", frozenset({"object"}): "{}"}  # by the only type that a value may have
TextToJson = Callable[[str, frozenset[str]], str]


@dataclass(slots=True)
class _Tag:
    key: str
    text: str = ""  # between the tags in it
    parts: list["_Tag"] = field(default_factory=list)


def nested_to_json(value: str, opening: str, schema: object, root: Schema, to_json: TextToJson) -> str | None:
    """The value as JSON; None if it does not close its tags. `opening`: what each tag begins with. `root`: the schema
    that `$ref` is in. `to_json`: of a text without tags, of the types that the schema allows."""
    tag = _tree(value, opening)
    return None if tag is None else _Json(root, to_json).value(tag, schema)


def _tree(value: str, opening: str) -> _Tag | None:
    tags = [_Tag("")]  # that are open
    position = 0
    for found in re.finditer(rf"{re.escape(opening)}(/?)([^<>]+)>", value):
        tags[-1].text += value[position : found.start()]
        position = found.end()
        closes, key = found.groups()
        if closes and (len(tags) == 1 or tags.pop().key != key):
            return None
        if not closes:
            tags.append(_Tag(key))
            tags[-2].parts.append(tags[-1])
        if len(tags) > _MAX_DEPTH:
            return None
    tags[-1].text += value[position:]
    return tags[0] if len(tags) == 1 else None


class _Json:
    def __init__(self, root: Schema, to_json: TextToJson) -> None:
        self._root = root
        self._to_json = to_json

    def value(self, tag: _Tag, schema: object) -> str:
        types = allowed_types(schema, self._root)
        if not tag.parts:
            return _EMPTY[types] if not tag.text and types in _EMPTY else self._to_json(tag.text, types)
        resolved = resolve(schema, self._root)
        is_list = "array" in types and all(part.key == _ITEM for part in tag.parts)
        if is_list or "object" not in types:
            return f"[{', '.join(self.value(part, resolved.get('items')) for part in tag.parts)}]"
        pairs = ((part.key, self.value(part, property_schema(resolved, part.key))) for part in tag.parts)
        return f"{{{', '.join(f'{quoted(key)}: {value}' for key, value in pairs)}}}"
