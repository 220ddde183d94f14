"""What the readers of `quantization_config` share."""

from collections.abc import Mapping, Sequence
from typing import Any

_GROUP_UNIT = 32  # inputs, as in `kernels.int_weights`, which imports torch


def only(field: str, value: object, supported: Sequence[object]) -> None:
    """Raise ValueError if the field has another value than these."""
    if value not in supported:
        raise ValueError(
            f"quantization with {field} {value} is not supported; supported: {', '.join(map(str, supported))}"
        )


def entries(stored: Mapping[str, Any], *fields: str) -> tuple[str, ...]:
    """The entries of several lists of names, each of which may be missing."""
    found = []
    for field in fields:
        listed = stored.get(field) or []
        if not isinstance(listed, list) or not all(isinstance(entry, str) for entry in listed):
            raise ValueError(f"{field} in quantization_config must be a list of names, got {listed!r}")
        found += listed
    return tuple(found)


def group_size(stored: Mapping[str, Any]) -> int | None:
    """None: a group is a whole column."""
    size = stored.get("group_size", 128)
    if not str(size).lstrip("-").isdigit() or (int(size) != -1 and (int(size) < 1 or int(size) % _GROUP_UNIT)):
        raise ValueError(
            f"quantization with group_size {size} is not supported; supported: -1, or a multiple of {_GROUP_UNIT}"
        )
    return None if int(size) == -1 else int(size)


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
