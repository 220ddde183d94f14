"""What the readers of `quantization_config` share."""

from collections.abc import Mapping, Sequence
from typing import Any


def only(field: str, value: object, supported: Sequence[object]) -> None:
    """Raise ValueError if the field has another value than these."""
    if value not in supported:
        raise ValueError(
            f"quantization with {field} {value} is not supported; supported: {', '.join(map(str, supported))}"
        )


def entries(stored: Mapping[str, Any], *fields: str) -> tuple[str, ...]:
    """The entries of several lists, each of which may be missing."""
    return tuple(entry for field in fields for entry in stored.get(field) or ())


def group_size(stored: Mapping[str, Any]) -> int | None:
    """None: a group is a whole column."""
    size = int(stored.get("group_size", 128))
    return None if size == -1 else size


def reads_fp8_kv_cache(scheme: Any) -> bool:
    """Whether a `kv_cache_scheme` asks for 8-bit floats with one stored scale for keys and one for values; None: there
    is no scheme. Raises ValueError for another."""
    if not scheme:
        return False
    if not isinstance(scheme, Mapping):
        raise ValueError(f"quantization with kv_cache_scheme {scheme} is not supported; supported: none, 8-bit floats")
    only("type in kv_cache_scheme", scheme.get("type"), ("float",))
    only("num_bits in kv_cache_scheme", scheme.get("num_bits"), (8,))
    only("strategy in kv_cache_scheme", scheme.get("strategy", "tensor"), ("tensor",))
    only("dynamic in kv_cache_scheme", scheme.get("dynamic", False), (False,))
    return True
