"""Rotary position embedding (RoPE): tables of cos and sin by position, with linear, Llama 3 and YaRN context
extension."""

import math
from dataclasses import dataclass
from typing import Literal

import torch

RopeType = Literal["default", "linear", "llama3", "yarn"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Fields as in a Hugging Face config's `rope_parameters`; each type reads its own."""

    theta: float = 10_000.0
    type: RopeType = "default"
    factor: float = 1.0
    original_max_position_embeddings: int = 0  # llama3, yarn: the context length before extension
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn; unset: from factor and mscale
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn


class RotaryTable:
    """cos and sin of each position's angles, [max_positions, head_dim] float32 each, in the layout of
    `rotate_and_cache`: the D/2 values twice, sin with its first half negated."""

    def __init__(self, config: RopeConfig, head_dim: int, max_positions: int, device: torch.device) -> None:
        frequencies = _frequencies(config, head_dim)
        angles = torch.arange(max_positions, dtype=torch.float32)[:, None] * frequencies
        factor = _attention_factor(config)
        cos, sin = angles.cos() * factor, angles.sin() * factor
        self.cos = torch.cat((cos, cos), dim=-1).to(device)
        self.sin = torch.cat((-sin, sin), dim=-1).to(device)

    def __call__(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """positions [T] -> cos, sin [T, head_dim]"""
        return self.cos.index_select(0, positions), self.sin.index_select(0, positions)


def _frequencies(config: RopeConfig, head_dim: int) -> torch.Tensor:
    plain = 1.0 / config.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    match config.type:
        case "default":
            return plain
        case "linear":
            return plain / config.factor
        case "llama3":
            return _llama3(config, plain)
        case "yarn":
            return _yarn(config, plain, head_dim)


def _llama3(config: RopeConfig, plain: torch.Tensor) -> torch.Tensor:
    """Llama 3.1: divide low frequencies by the factor, keep high ones, interpolate between. [head_dim / 2]"""
    turns = config.original_max_position_embeddings * plain / (2 * math.pi)  # over the original context
    blend = (turns - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
    blend = blend.clamp(0, 1)
    return (1 - blend) * plain / config.factor + blend * plain


def _yarn(config: RopeConfig, plain: torch.Tensor, head_dim: int) -> torch.Tensor:
    """YaRN (Peng et al., 2023, arXiv 2309.00071, "NTK-by-parts"): as llama3, but blended over the dimension's index."""

    def index_of(turns: float) -> float:
        """The (fractional) index of the frequency that makes `turns` turns over the original context."""
        length = config.original_max_position_embeddings
        return head_dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(config.theta))

    low, high = index_of(config.beta_fast), index_of(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # avoids a division by zero
    interpolated = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return plain / config.factor * interpolated + plain * (1 - interpolated)


def _attention_factor(config: RopeConfig) -> float:
    if config.type != "yarn":
        return 1.0
    if config.attention_factor is not None:
        return config.attention_factor

    def scale(mscale: float) -> float:
        return 0.1 * mscale * math.log(config.factor) + 1.0 if config.factor > 1 else 1.0

    if config.mscale and config.mscale_all_dim:
        return scale(config.mscale) / scale(config.mscale_all_dim)
    return scale(1.0)
