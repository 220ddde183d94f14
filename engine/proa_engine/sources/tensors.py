"""Tensor: what the header of a weight file says of one tensor, whatever the file's format."""

from dataclasses import dataclass
from math import prod

from proa_engine.layers.quantized.ggml_types import BLOCKS

# Bytes of a value, by safetensors' names.
ITEM_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64"), 8),
}
FLOATS = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class Change:
    """How GGUF's values differ from those of the Hugging Face checkpoint that they were converted from.

    `head_dim`: the first and the second half of each head's rows alternate; 0: they do not. `offset`: was added.
    """

    head_dim: int = 0
    offset: float = 0.0


UNCHANGED = Change()


@dataclass(frozen=True, slots=True)
class Tensor:
    """`dtype`: safetensors' or GGUF's name of the type. `start`: the offset of the first byte in the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    change: Change = UNCHANGED

    @property
    def size(self) -> int:
        """The number of values."""
        return prod(self.shape)

    @property
    def item(self) -> tuple[int, int]:
        """The values of the smallest part that can be read, and its bytes."""
        return BLOCKS[self.dtype] if self.dtype in BLOCKS else (1, ITEM_BYTES[self.dtype])

    def as_bytes(self) -> "Tensor":
        """Blocks as the bytes of rows."""
        values, num_bytes = self.item
        return Tensor("U8", (*self.shape[:-1], self.shape[-1] // values * num_bytes), self.start, self.change)

    @property
    def num_bytes(self) -> int:
        values, num_bytes = self.item
        return self.size // values * num_bytes
