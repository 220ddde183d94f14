"""Settings that every test shares."""

from hypothesis import settings

# The same examples on every machine, and no clock: a loaded machine must not fail a property.
settings.register_profile("proa", deadline=None, derandomize=True, database=None)
settings.load_profile("proa")
