"""How many cases tests try: few in `make test`, more in `make test-all`, which sets PROA_THOROUGH_TESTS."""

import os

THOROUGH = bool(os.environ.get("PROA_THOROUGH_TESTS"))


def seeds(usual: int, thorough: int) -> range:
    """Seeds of random cases."""
    return range(thorough if THOROUGH else usual)
