"""ExtraFields: refuses or ignores, never silently, the fields that a request's class does not have."""

import logging
from collections.abc import Iterable, Mapping
from typing import Any, Final
from urllib.parse import quote

from proa_gateway.errors import InvalidRequest, UnsupportedField
from proa_gateway.serving.refused_fields import NO_EFFECT, Refused
from proa_gateway.serving.warnings import LogOnce

IGNORED_HEADER: Final = b"x-proa-ignored-fields"
MAX_EXTRA = 1024
MAX_NAMES = 20  # in the header
MAX_CHARACTERS = 64  # of a name
_log = logging.getLogger(__name__)


class ExtraFields:
    """Logs each ignored name once."""

    def __init__(self) -> None:
        self._log_once = LogOnce(_log)

    def check(self, extra: Mapping[str, Any], refused: Mapping[str, Refused]) -> list[tuple[bytes, bytes]]:
        """Response headers that name the ignored fields. Raises `UnsupportedField` for the first refused one,
        `InvalidRequest` for too many."""
        if len(extra) > MAX_EXTRA:
            raise InvalidRequest(f"The body has {len(extra)} unknown fields; the limit is {MAX_EXTRA}.")
        unknown: list[str] = []
        for name, value in extra.items():
            rule = refused.get(name)
            if rule is not None and not rule.accepts(value):
                raise UnsupportedField(f"{name} is not supported: {rule.reason}.", param=name)
            if rule is None and name not in NO_EFFECT:
                unknown.append(name)
        return self.ignored(unknown)

    def ignored(self, names: Iterable[str]) -> list[tuple[bytes, bytes]]:
        """Response headers that name these fields."""
        short = [name[:MAX_CHARACTERS] for name in names]
        self._log_once.warn("ignored the unknown request field %r; later requests with it are not logged", short)
        value = ", ".join(quote(name, safe=".", errors="replace") for name in short[:MAX_NAMES])
        return [(IGNORED_HEADER, value.encode())] if value else []
