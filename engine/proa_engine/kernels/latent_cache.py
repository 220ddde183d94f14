"""The cached rows of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): a normalised latent of keys and
values and one rotated key for all heads."""

import torch

from proa_engine.kernels.rms_norm import rms_norm
from proa_engine.kernels.rotate_and_cache import rotate


def cache_latents(
    compressed: torch.Tensor,
    norm: tuple[torch.Tensor, float],
    cos: torch.Tensor,
    sin: torch.Tensor,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    interleaved: bool,
) -> None:
    """Write rows of compressed [T, rank + rope_dim] to cache [num_blocks, block_size, rank + rope_dim].

    Their first `rank` values are normalised with the weight [rank] and epsilon of `norm`; the others are rotated by
    cos, sin [T, rope_dim] float32, as `rotate_part` does. Token t's slot is block * block_size + offset; slot -1 is
    padding and is not written.
    """
    weight, eps = norm
    rank = len(weight)
    latent = rms_norm(compressed[:, :rank].contiguous(), weight, eps)
    key = rotate_part(compressed[:, None, rank:], cos, sin, interleaved=interleaved)[:, 0]
    rows = torch.cat((latent, key), dim=-1).to(cache.dtype)
    places = cache.view(-1, rows.shape[1])
    if places.is_cpu:
        is_token = slot_mapping >= 0
        places.index_copy_(0, slot_mapping[is_token], rows[is_token])
    else:
        _write_triton(rows, places, slot_mapping)


def rotate_part(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool) -> torch.Tensor:
    """Rotate x [T, heads, rope_dim]. `interleaved`: the pairs are neighbours; they come out as halves, so queries and
    keys must both be rotated so."""
    if interleaved:
        x = x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    return rotate(x, cos, sin)
