"""Rotary position embedding (RoPE): tables of cos and sin by position, with linear, Llama 3, LongRoPE
and YaRN context extension."""

import math
from dataclasses import dataclass
from typing import Literal

import torch

RopeType = Literal["default", "linear", "llama3", "longrope", "proportional", "yarn", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Fields as in a Hugging Face config's `rope_parameters`; each type reads its own."""

    dim: int  # the first `dim` values of a head are rotated
    interleaved: bool = False  # pairs are neighbours; False: half of `dim` apart
    theta: float = 10_000.0
    type: RopeType = "default"  # none: positions are not encoded
    factor: float = 1.0
    original_max_position_embeddings: int = 0  # llama3, longrope, yarn: the context length before extension
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn, longrope; unset: from factor and mscale
    short_factor: tuple[float, ...] = ()  # longrope: for models that run within the context before extension
    long_factor: tuple[float, ...] = ()  # longrope
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn
    proportion: float = 1.0  # proportional: share of the frequencies, from the highest on; the others are 0
    llama_4_scaling_beta: float = 0.0  # not zero: queries grow with the logarithm of their position
    # With three positions a token: how many frequencies take the time, the row and the column. They take turns from the
    # highest frequency on, and what rows and columns leave is the time's; or each has neighbouring ones, and further
    # sections begin with the time again. Empty: a token has one position.
    sections: tuple[int, ...] = ()
    sections_take_turns: bool = True


@dataclass(frozen=True, slots=True)
class Rotation:
    """A batch's angles, in the layout of `rotate_and_cache`: D/2 values twice, sin with its first half negated."""

    cos: torch.Tensor  # [T, dim] float32
    sin: torch.Tensor  # [T, dim] float32
    query_scale: torch.Tensor | None  # [T, 1, 1] float32: factors of the rotated queries


class RotaryTable:
    """The rotation of each position. None of its rows are kept if it encodes no position."""

    def __init__(self, config: RopeConfig, max_positions: int, device: torch.device) -> None:
        self._encodes = config.type != "none"
        num_rows = max_positions if self._encodes else 0
        angles = torch.arange(num_rows, dtype=torch.float32)[:, None] * _frequencies(config, max_positions)
        factor = _attention_factor(config)
        cos, sin = angles.cos() * factor, angles.sin() * factor
        self.cos = torch.cat((cos, cos), dim=-1).to(device)
        self.sin = torch.cat((-sin, sin), dim=-1).to(device)
        self.query_scale: torch.Tensor | None = None
        if config.llama_4_scaling_beta:
            self.query_scale = _llama4_scale(config, num_rows)[:, None, None].to(device)
        self._axes = _axes(config).to(device)

    def __call__(self, positions: torch.Tensor) -> Rotation:
        """positions [T], or [3, T]: time, row and column (M-RoPE of Qwen2.5-VL, interleaved of Qwen3-VL)."""
        if not self._encodes:
            shape = positions.shape[0], self.cos.shape[1]
            return Rotation(self.cos.new_ones(shape), self.sin.new_zeros(shape), None)
        if positions.dim() == 2:
            axes = self._axes.expand(positions.shape[1], -1)
            return Rotation(_by_axis(self.cos, positions, axes), _by_axis(self.sin, positions, axes), None)
        scale = self.query_scale
        return Rotation(
            self.cos.index_select(0, positions),
            self.sin.index_select(0, positions),
            None if scale is None else scale.index_select(0, positions),
        )


class RotaryTables:
    """Builds each table once."""

    def __init__(self, max_positions: int, device: torch.device) -> None:
        self._max_positions = max_positions
        self._device = device
        self._tables: dict[RopeConfig, RotaryTable] = {}

    def table(self, config: RopeConfig) -> RotaryTable:
        if config not in self._tables:
            self._tables[config] = RotaryTable(config, self._max_positions, self._device)
        return self._tables[config]


def _by_axis(table: torch.Tensor, positions: torch.Tensor, axes: torch.Tensor) -> torch.Tensor:
    """table [positions, dim], positions [3, T], axes [T, dim] -> [T, dim]: of each value the row at its axis's
    position."""
    return table.gather(0, positions.t().gather(1, axes))


def _axes(config: RopeConfig) -> torch.Tensor:
    """The axis of each value of a rotation, [dim]: 0 time, 1 row, 2 column."""
    axes = torch.zeros(config.dim // 2, dtype=torch.int64)
    if config.sections_take_turns:
        for axis, count in list(enumerate(config.sections))[1:]:
            axes[axis : 3 * count : 3] = axis
    else:
        axes = torch.cat([torch.full((count,), index % 3) for index, count in enumerate(config.sections)])
    return torch.cat((axes, axes))


def _frequencies(config: RopeConfig, max_positions: int) -> torch.Tensor:
    """[dim / 2]"""
    plain = 1.0 / config.theta ** (torch.arange(0, config.dim, 2, dtype=torch.float32) / config.dim)
    match config.type:
        case "default" | "none":
            return plain
        case "linear":
            return plain / config.factor
        case "llama3":
            return _llama3(config, plain)
        case "longrope":
            # One set for all requests: cached keys of one set cannot be read with the other.
            is_long = max_positions > config.original_max_position_embeddings
            return plain / torch.tensor(config.long_factor if is_long else config.short_factor)
        case "proportional":
            count = int(config.proportion * config.dim // 2)
            return torch.cat((plain[:count], torch.zeros(len(plain) - count))) / config.factor
        case "yarn":
            return _yarn(config, plain)


def _llama4_scale(config: RopeConfig, num_positions: int) -> torch.Tensor:
    """Llama 4's attention scale: 1 within the original context, then it grows with the logarithm. [num_positions]"""
    lengths = torch.arange(num_positions, dtype=torch.float32) // config.original_max_position_embeddings
    return 1 + config.llama_4_scaling_beta * torch.log1p(lengths)


def _llama3(config: RopeConfig, plain: torch.Tensor) -> torch.Tensor:
    """Llama 3.1: divide low frequencies by the factor, keep high ones, interpolate between. [dim / 2]"""
    turns = config.original_max_position_embeddings * plain / (2 * math.pi)  # over the original context
    blend = (turns - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
    blend = blend.clamp(0, 1)
    return (1 - blend) * plain / config.factor + blend * plain


def _yarn(config: RopeConfig, plain: torch.Tensor) -> torch.Tensor:
    """YaRN (Peng et al., 2023, arXiv 2309.00071, "NTK-by-parts"): as llama3, but blended over the dimension's index."""

    def index_of(turns: float) -> float:
        """The (fractional) index of the frequency that makes `turns` turns over the original context."""
        length = config.original_max_position_embeddings
        return config.dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(config.theta))

    low, high = index_of(config.beta_fast), index_of(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.dim - 1)
    if low == high:
        high += 0.001  # avoids a division by zero
    interpolated = ((torch.arange(config.dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return plain / config.factor * interpolated + plain * (1 - interpolated)


def _attention_factor(config: RopeConfig) -> float:
    if config.type not in ("longrope", "yarn"):
        return 1.0
    if config.attention_factor is not None:
        return config.attention_factor
    if config.type == "longrope":
        return math.sqrt(1 + math.log(max(config.factor, 1)) / math.log(config.original_max_position_embeddings))

    def scale(mscale: float) -> float:
        return 0.1 * mscale * math.log(config.factor) + 1.0 if config.factor > 1 else 1.0

    if config.mscale and config.mscale_all_dim:
        return scale(config.mscale) / scale(config.mscale_all_dim)
    return scale(1.0)
