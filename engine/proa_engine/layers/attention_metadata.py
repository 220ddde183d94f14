"""AttentionMetadata: the description of one step's batch for attention, the same for every layer."""

from dataclasses import dataclass

import torch

from proa_engine.kernels.state_rows import StateRows


@dataclass(frozen=True, slots=True)
class TableRows:
    """Where the batch's tokens are in the layers of one block table.

    A row of `block_table` is read up to ceil(seq_len / block_size) entries, from the first block that the layer's
    window can see; the others have no meaning.
    """

    block_table: torch.Tensor  # [R, max_blocks] int32
    slot_mapping: torch.Tensor  # [T] int64: block * block_size + offset of each token; -1: padding, written nowhere


@dataclass(frozen=True, slots=True)
class ImageRows:
    """The tokens of a step that stand for images."""

    rows: torch.Tensor  # [N] int64: their rows among the step's tokens
    embeddings: torch.Tensor  # [N, width] in the model's type: what `ImageEncoder` made of them


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """A batch of R requests with T tokens in all, decodes first. Tensors lie on the model's device.

    A request's tokens are its last ones: those that end at seq_len. Where decodes have more than one token, some may
    lie before the request's beginning or have slot -1: these are padding.
    """

    query_start_loc: torch.Tensor  # [R + 1] int32: request r's tokens are query_start_loc[r] … query_start_loc[r + 1]
    seq_lens: torch.Tensor  # [R] int32: tokens in the KV cache once this step has written its own
    tables: tuple[TableRows, ...]  # by `LayerCache.table`
    num_decodes: int  # leading requests with `decode_width` tokens each
    decode_width: int = 1  # more if drafts are verified; then the batch has decodes only
    states: StateRows | None = None  # set if the model has recurrent layers
    token_types: torch.Tensor | None = None  # [T] int64: 1 in the second text of a pair, for encoders; None: all 0
    images: ImageRows | None = None
    # [T] int32, for models whose image tokens attend to all of their image: the position behind each token's image,
    # else behind the token itself. None: the step has no image.
    ends: torch.Tensor | None = None


def table_rows(block_tables: torch.Tensor, slot_mappings: torch.Tensor) -> tuple[TableRows, ...]:
    """The tables of block_tables [tables, R, max_blocks] int32 and slot_mappings [tables, T] int64."""
    return tuple(map(TableRows, block_tables.unbind(), slot_mappings.unbind()))
