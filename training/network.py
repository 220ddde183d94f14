"""The network to train: a compact Llama in plain torch, with projections of the same input merged.

It computes the same as Hugging Face's `LlamaForCausalLM` with tied embeddings. `export.py` splits the merged matrices.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class NetworkConfig:
    """Sizes of the network: the built-in model's, unless given. `num_heads` is a multiple of `num_kv_heads`."""

    vocab_size: int
    hidden_size: int = 192
    num_layers: int = 4
    num_heads: int = 6
    num_kv_heads: int = 6
    intermediate_size: int = 512
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = 2048

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads


class Block(nn.Module):
    """One pre-norm layer: attention, then a gated feed-forward."""

    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        hidden, ffn = config.hidden_size, config.intermediate_size
        self.heads, self.kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.attention_norm = nn.RMSNorm(hidden, eps=config.rms_norm_eps)
        self.qkv = nn.Linear(hidden, (self.heads + 2 * self.kv_heads) * self.head_dim, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)
        self.ffn_norm = nn.RMSNorm(hidden, eps=config.rms_norm_eps)
        self.gate_up = nn.Linear(hidden, 2 * ffn, bias=False)
        self.down = nn.Linear(ffn, hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [B, T, H]; cos and sin [T, head_dim]."""
        batch, length, hidden = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, length, -1, self.head_dim).transpose(1, 2)
        q, k, v = qkv.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        rotated = [rotate(q, cos, sin), rotate(k, cos, sin)]
        attended = functional.scaled_dot_product_attention(
            rotated[0], rotated[1], v, is_causal=True, enable_gqa=self.heads != self.kv_heads
        )
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, hidden))
        gate, up = self.gate_up(self.ffn_norm(x)).chunk(2, dim=-1)
        fed: Tensor = self.down(functional.silu(gate) * up)
        return x + fed


class Network(nn.Module):
    """Embedding, blocks, final norm; the embedding matrix is also the output head."""

    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self._initialize()

    def _initialize(self) -> None:
        residual_scale = (2 * self.config.num_layers) ** -0.5
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                scale = residual_scale if name.endswith(("out.weight", "down.weight")) else 1.0
                nn.init.normal_(parameter, std=scale * parameter.shape[1] ** -0.5 * 0.5)

    def forward(self, token_ids: Tensor) -> Tensor:
        """token_ids [B, T] → hidden states [B, T, H] after the final norm."""
        cos, sin = rope_tables(self.config, token_ids.shape[1])
        x = self.embedding(token_ids)
        for block in self.blocks:
            x = block(x, cos, sin)
        hidden: Tensor = self.norm(x)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [..., H] → logits [..., vocab]."""
        return functional.linear(hidden, self.embedding.weight)


def rope_tables(config: NetworkConfig, length: int) -> tuple[Tensor, Tensor]:
    """Cosines and signed sines [T, head_dim] for `rotate`, in Hugging Face's half-split layout."""
    half = config.head_dim // 2
    frequencies = config.rope_theta ** (-torch.arange(half, dtype=torch.float32) / half)
    angles = torch.outer(torch.arange(length, dtype=torch.float32), frequencies)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding of x [B, heads, T, head_dim]."""
    return x * cos + x.roll(x.shape[-1] // 2, dims=-1) * sin
