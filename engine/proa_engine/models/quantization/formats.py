"""How matrices of a checkpoint are stored: a `Format` for each layout of tensors, and rules that say which modules have
which. Does not import torch."""

import re
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from typing import ClassVar, Literal

PATTERN = "re:"  # how an entry of a rule begins that is a pattern


class StoredFormat:
    """What the formats share."""

    __slots__ = ()
    takes_stacked_experts: ClassVar[bool] = False  # all experts of a layer in one tensor
    multiplies_8_bits: ClassVar[bool] = False  # inputs are quantized too; a GPU takes half the time for such products

    @property
    def expert_refusal(self) -> str:
        """Why experts with tensors of their own cannot have this format, to be read behind a name; empty: they can."""
        return ""


@dataclass(frozen=True, slots=True)
class AwqFormat(StoredFormat):
    group_size: int | None  # None: a group is a whole column


@dataclass(frozen=True, slots=True)
class GptqFormat(StoredFormat):
    bits: Literal[4, 8]
    group_size: int | None
    desc_act: bool
    symmetric: bool
    zero_offset: int

    @property
    def expert_refusal(self) -> str:
        return _unordered("gptq") if self.desc_act and self.group_size is not None else ""


@dataclass(frozen=True, slots=True)
class PackQuantizedFormat(StoredFormat):
    bits: Literal[4, 8]
    group_size: int | None
    symmetric: bool
    group_order: bool  # the group of each input is stored

    @property
    def expert_refusal(self) -> str:
        return _unordered("compressed-tensors") if self.group_order else ""


def _unordered(quantization: str) -> str:
    return (
        f"experts quantized by {quantization} with desc_act or actorder group, so that the inputs of a group do not "
        "lie together, are not supported"
    )


@dataclass(frozen=True, slots=True)
class Fp8Format(StoredFormat):
    multiplies_8_bits = True
    strategy: Literal["tensor", "channel"]  # what has a scale
    static: bool  # the scale of the inputs is stored


@dataclass(frozen=True, slots=True)
class BlockFp8Format(StoredFormat):
    """Each 128 x 128 block has a scale."""

    multiplies_8_bits = True
    scale_name: str


@dataclass(frozen=True, slots=True)
class Int8Format(StoredFormat):
    """Integers, of the inputs too."""

    multiplies_8_bits = True
    strategy: Literal["tensor", "channel"]  # what has a scale
    static: bool  # the scale of the inputs is stored
    symmetric: bool  # the inputs; False: a static scale has a zero beside it

    @property
    def expert_refusal(self) -> str:
        if self.symmetric:
            return ""
        return "experts with asymmetric activations in 8-bit integers are not supported; supported: symmetric ones"


@dataclass(frozen=True, slots=True)
class Mxfp4Format(StoredFormat):
    """Experts in the tensors of gpt-oss."""

    takes_stacked_experts = True

    @property
    def expert_refusal(self) -> str:
        return "experts of mxfp4 in one tensor each are not supported; supported: all experts in one tensor"


@dataclass(frozen=True, slots=True)
class Mxfp4PackedFormat(StoredFormat):
    """4-bit floats with a power of two (`weight_scale`) for each 32 inputs."""

    weight_name: str


@dataclass(frozen=True, slots=True)
class Nvfp4Format(StoredFormat):
    """4-bit floats with an 8-bit float (`weight_scale`) for each 16 inputs, and one number for the whole matrix."""

    weight_name: str
    global_scale_name: str
    divides: bool  # by the global scale; False: it multiplies
    input_scale_name: str  # may be missing, and is not used: inputs are not quantized


@dataclass(frozen=True, slots=True)
class GgmlFormat(StoredFormat):
    """GGUF's blocks."""

    kind: str  # of `INTEGER_BITS`


@dataclass(frozen=True, slots=True)
class OnlineFp8Format(StoredFormat):
    """Stored unquantized, and quantized while loading."""

    takes_stacked_experts = True
    multiplies_8_bits = True
    by_block: bool = False  # each 128 x 128 block has a scale; False: each output


@dataclass(frozen=True, slots=True)
class PluginFormat(StoredFormat):
    """Of an installed package, which reads the fields of `quantization_config`."""

    takes_stacked_experts = True  # or not: its method decides
    quant_method: str


Format = (
    AwqFormat
    | GptqFormat
    | PackQuantizedFormat
    | Fp8Format
    | BlockFp8Format
    | Int8Format
    | Mxfp4Format
    | Mxfp4PackedFormat
    | Nvfp4Format
    | GgmlFormat
    | OnlineFp8Format
    | PluginFormat
)


@dataclass(frozen=True)  # without slots, because of the cached properties
class Rule:
    """The format of some modules; None: they are not quantized."""

    modules: tuple[str, ...]  # each a module's name or parts of it, or PATTERN and one that begins like the name
    format: Format | None

    def names(self, module: str) -> bool:
        parts = module.split(".")
        runs = (".".join(parts[start:end]) for start, end in combinations(range(len(parts) + 1), 2))
        return not self._names.isdisjoint(runs) or any(pattern.match(module) for pattern in self.patterns)

    @cached_property
    def _names(self) -> frozenset[str]:
        """Looked up, because a list may name every matrix of every expert."""
        return frozenset(entry for entry in self.modules if not entry.startswith(PATTERN))

    @cached_property
    def patterns(self) -> tuple[re.Pattern[str], ...]:
        """Raises ValueError for an entry that is not a pattern."""
        return tuple(_compile(entry.removeprefix(PATTERN)) for entry in self.modules if entry.startswith(PATTERN))


def _compile(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(
            f"quantization_config has a pattern that cannot be read: {pattern[:200]!r}: {error}"
        ) from error


@dataclass(frozen=True, slots=True)
class Quantization:
    """The formats of a checkpoint's matrices."""

    format: Format | None  # of the modules that no rule names; None: not quantized
    rules: tuple[Rule, ...] = ()  # of those that name a module, the first holds
    fp8_kv_cache: bool = False  # the KV cache is meant to hold 8-bit floats, with scales that are stored

    @property
    def multiplies_8_bits(self) -> bool:
        """Whether the modules that no rule names do."""
        return isinstance(self.format, StoredFormat) and self.format.multiplies_8_bits

    def format_of(self, module: str) -> Format | None:
        return next((rule.format for rule in self.rules if rule.names(module)), self.format)

    def except_for(self, *modules: str) -> "Quantization":
        """The same with `modules` unquantized, whatever other rules say."""
        return replace(self, rules=(Rule(modules, None), *self.rules)) if modules else self

    def with_kv_cache(self, *, fp8: bool) -> "Quantization":
        return replace(self, fp8_kv_cache=fp8)
