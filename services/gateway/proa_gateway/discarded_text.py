"""DiscardedText: in place of a `TextStream` where only the prompt is scored."""

from collections.abc import Sequence

from proa.text import TextDelta


class DiscardedText:
    """Tokens add no text and do not count."""

    plain = None

    def push(self, token_ids: Sequence[int]) -> TextDelta:
        return TextDelta("", 0)

    def boundary(self) -> TextDelta:
        return TextDelta("", 0)

    def finish(self, token_ids: Sequence[int], *, stop_token: bool) -> TextDelta:
        return TextDelta("", 0)
