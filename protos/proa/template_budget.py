"""What rendering a chat template may use: time, and the size of what it makes."""

import time
from collections.abc import Iterable
from contextvars import ContextVar
from itertools import islice
from typing import Any, Final

CPU_SECONDS: Final = 2.0
SIZE: Final = 2**27
"""A prompt of a million tokens has 4 million characters, and templates make each of them a few times."""
MAX_VALUE: Final = 2**25
"""The size of one value, more than a body may have. No function in C takes more than about 0.1 s for it, and no other
thread runs meanwhile."""
PART: Final = 16
"""What a part of a container counts beside its characters: writing a number takes as long as copying so many."""
STEP: Final = 256
"""What a guard charges beside the value's size, for the time of the template's nodes between two guards."""
_CLOCK_SIZE: Final = 16 * STEP  # charged between two looks at the clock, which takes as long as a guard
_LARGE_VALUE: Final = 2**16  # once there is one, each guard looks at the clock: comparing it takes long, and is free
_PAUSE: Final = 0.001
_PIECES: Final = 32  # of a prompt, joined at once


class TemplateTooCostly(ValueError):
    """A template takes more time or memory than its budget."""


class Budget:
    """Seconds of CPU time, and the characters and parts of containers that a rendering makes. Used by one thread.

    `is_inline`: it runs on an event loop. Then seconds are of wall time. Otherwise the rendering lets other threads run
    every millisecond; the interpreter by itself makes them wait for five.
    """

    __slots__ = ("_is_inline", "_pause_at", "_seconds", "_sizes", "_started", "check_below", "size")

    def __init__(self, seconds: float = CPU_SECONDS, size: int = SIZE, *, is_inline: bool = False) -> None:
        self.size = size
        self.check_below = size - _CLOCK_SIZE
        self._seconds = seconds
        self._is_inline = is_inline
        self._sizes: dict[int, tuple[object, int]] | None = None
        self._started = 0.0 if is_inline else time.thread_time()
        self._pause_at = time.perf_counter() + (seconds if is_inline else _PAUSE)

    def spend(self, size: int) -> None:
        """Charge what is about to be made, or was made. Raises `TemplateTooCostly`."""
        self.size -= size + STEP
        if self.size < self.check_below:
            self.check(size)

    def check(self, size: int) -> None:
        """Look at the clock. Called after a value of this size was charged, if `size` has fallen below `check_below`.
        Raises `TemplateTooCostly`."""
        if self.size < 0 or size > MAX_VALUE:
            raise TemplateTooCostly("it makes too much text or too long lists")
        if time.perf_counter() > self._pause_at:
            if self._is_inline or time.thread_time() - self._started > self._seconds:
                raise TemplateTooCostly(f"it takes more than {self._seconds:g} s of CPU time")
            time.sleep(0)
            self._pause_at = time.perf_counter() + _PAUSE
        if size < _LARGE_VALUE and self.check_below > self.size:
            self.check_below = max(0, self.size - _CLOCK_SIZE)
        else:
            self.check_below = SIZE

    def size_of(self, value: object) -> int:
        """The size of a value, with each part as often as it occurs: `[x, x]`, forty times nested, has 2**40 parts when
        it is written as text or compared."""
        if isinstance(value, str | bytes):
            return len(value) + PART
        if not isinstance(value, list | tuple | dict):
            return PART
        if self._sizes is None:
            self._sizes = {}
        known = self._sizes.get(id(value))
        if known is not None:
            return known[1]
        size = PART + sum(map(self.size_of, value))
        if isinstance(value, dict):
            size += sum(map(self.size_of, value.values()))
        self._sizes[id(value)] = value, size  # with the value: no other object gets its id meanwhile
        return size


current: Final[ContextVar[Budget]] = ContextVar("template_budget")
"""The budget of the template that this thread compiles or renders. It is found in 40 ns; a thread's own variable takes
110 ns."""


def grown(value: Any) -> Any:
    """Charge a value that was made of others. Return it."""
    budget = current.get()
    if isinstance(value, str):
        size = len(value)
    elif isinstance(value, list | tuple | dict):
        size = budget.size_of(value)
    else:
        size = 0
    budget.size -= size + STEP
    if budget.size < budget.check_below:
        budget.check(size)
    return value


def copied(value: Any) -> Any:
    """Charge a copy of a part of a value, whose items were charged before. Return it."""
    current.get().spend(len(value) if isinstance(value, str | bytes | list | tuple) else 0)
    return value


def concat(pieces: Iterable[str]) -> str:
    """Jinja's `concat`: of the whole prompt, where `pieces` is the running template, or of a block's or a macro's text.
    Charges the text."""
    budget = current.get()
    if isinstance(pieces, list):
        budget.spend(sum(map(len, pieces)))
        return "".join(pieces)
    running = iter(pieces)
    texts = chunk = list(islice(running, _PIECES))
    budget.spend(sum(map(len, chunk)))
    while len(chunk) == _PIECES:
        chunk = list(islice(running, _PIECES))
        budget.spend(sum(map(len, chunk)))
        texts += chunk
    return "".join(texts)
