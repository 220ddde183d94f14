"""ArgumentsReader: the interface of what reads a call's arguments in a format's own syntax."""

from typing import Protocol


class ArgumentsReader(Protocol):
    """Turns the text of one call's arguments into JSON as it comes, without reading any of it twice."""

    @property
    def is_complete(self) -> bool:
        """Whether the arguments have ended."""
        ...

    @property
    def rest(self) -> str:
        """Text after the end of the arguments, once they are complete."""
        ...

    def feed(self, text: str) -> str:
        """Read more text. Returns the JSON text of the arguments that is certain now, possibly none."""
        ...

    def close(self, *, by_model: bool) -> str:
        """The call ends here, complete or not. Returns what is left to be sent. `by_model`: the model has closed the
        call; otherwise the output ends, and what it has not ended stays open."""
        ...
