"""Tags: the template of an argument in tags, split at its places."""

import re
from dataclasses import dataclass

_PLACES = re.compile(r"\$(?:key|is_string|value)")


@dataclass(frozen=True, slots=True)
class Tags:
    """The text around the key and the value of one argument. The model may leave out whitespace beside tags."""

    open: str
    after_key: str  # a tag or quote; empty: the key ends at `header_end`
    header_end: str  # what ends the tag before the value
    before_value: str  # whitespace, as is `after_value`
    after_value: str
    close: str

    @classmethod
    def of(cls, item: str) -> "Tags":
        """`item`: one argument as the model is to write it, with `$key` and `$value`, and with `$is_string` where the
        model writes whether the value is a string, as true or false."""
        before_key, *between, after_value = _PLACES.split(item)
        header = between[-1].rstrip()
        header_end = header[max(header.rfind("<"), 0) :]
        close = after_value.lstrip()
        return cls(
            open=before_key.strip(),
            after_key="".join(between)[: -len(between[-1])].strip() or header.removesuffix(header_end).strip(),
            header_end=header_end,
            before_value=between[-1][len(header) :],
            after_value=after_value[: len(after_value) - len(close)],
            close=close.rstrip(),
        )
