"""Settings that every test shares."""

import gc

from hypothesis import settings

# The same examples on every machine, and no clock: a loaded machine must not fail a property.
settings.register_profile("proa", deadline=None, derandomize=True, database=None)
settings.load_profile("proa")


def pytest_collection() -> None:
    """Collect without the garbage collector: nothing that imports and the collection of tests make is garbage."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Collect garbage from now on, but never visit the million objects that live as long as the process."""
    gc.freeze()
    gc.enable()
