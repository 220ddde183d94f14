"""Examples of sampling parameters, for tests of what carries or applies them."""

from typing import Any

# Each has another value than by default, exact in 32-bit floats.
EXAMPLES: dict[str, Any] = {
    "temperature": 0.5,
    "top_p": 0.25,
    "top_k": 7,
    "min_p": 0.125,
    "presence_penalty": 1.5,
    "frequency_penalty": -0.5,
    "repetition_penalty": 1.25,
}
FLOATS = tuple(name for name, example in EXAMPLES.items() if isinstance(example, float))

OUT_OF_RANGE: tuple[tuple[str, float], ...] = (
    ("top_p", 0),
    ("top_p", 1.01),
    ("top_k", -2),
    ("min_p", -0.1),
    ("presence_penalty", 3),
    ("frequency_penalty", -3),
    ("repetition_penalty", 0),
)

TRUNCATED: dict[str, Any] = {"top_k": 20, "min_p": 0.02}  # few likely tokens are left, and more than one
