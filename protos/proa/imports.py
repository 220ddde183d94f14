"""Import large modules in less time."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def importing() -> Iterator[None]:
    """Import large modules within the context: without the garbage collector, which then ignores what exists.

    It would go through all of their objects again and again, and free none: a tenth of the CPU time of a gateway's
    imports, and of an engine's with torch 2.13.
    """
    with no_garbage_collection():
        yield
    gc.freeze()


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Disable the garbage collector within the context."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
