"""LoRARequest: the adapter of an offline request, with vLLM's fields."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """`lora_int_id` is not used: adapters are identified by their names. Raises `ValueError` for an empty name."""

    lora_name: str
    lora_int_id: int
    lora_path: str  # folder with adapter_config.json and adapter_model.safetensors

    def __post_init__(self) -> None:
        if not self.lora_name or not self.lora_path:
            raise ValueError(f"a LoRARequest needs a name and a path, got {self}")


def paths_by_name(requests: Iterable[LoRARequest]) -> dict[str, str]:
    """Raises `ValueError` if two have one name and different paths."""
    paths: dict[str, str] = {}
    for request in requests:
        if paths.setdefault(request.lora_name, request.lora_path) != request.lora_path:
            raise ValueError(f"two adapters have the name {request.lora_name!r}")
    return paths
