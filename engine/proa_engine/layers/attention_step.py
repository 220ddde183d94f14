"""AttentionStep: what the layers of one step share, computed at the first layer that needs it."""

from dataclasses import dataclass, field

import torch

from proa_engine.kernels.latent_attention import head_groups
from proa_engine.kernels.paged_attention import AttentionPlan, plan_attention
from proa_engine.kernels.state_rows import StatePlan, plan_states
from proa_engine.kernels.store_kv import CacheRows, cache_rows
from proa_engine.layers.attention_metadata import AttentionMetadata, TableRows
from proa_engine.layers.cache_layers import LayerCache
from proa_engine.layers.rotary import RotaryTable, Rotation


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """What a step has for attention layers that are alike in their cache's layout, their rotation and their window."""

    table: TableRows
    rotation: Rotation
    plan: AttentionPlan
    rows: CacheRows | None  # as from `AttentionStep.cache_rows`


@dataclass(frozen=True, slots=True)
class AttentionStep:
    """What attention layers of one step share. Its methods compute at the first layer that needs the result."""

    metadata: AttentionMetadata
    positions: torch.Tensor  # [T] int64
    batch_invariant: bool
    _inputs: dict[tuple[object, ...], AttentionInputs] = field(default_factory=dict)
    _rotations: dict[RotaryTable, Rotation] = field(default_factory=dict)
    _plans: dict[tuple[object, ...], AttentionPlan] = field(default_factory=dict)
    _rows: dict[tuple[object, ...], CacheRows] = field(default_factory=dict)
    _state_plans: list[StatePlan] = field(default_factory=list)  # one at most

    def inputs(self, cache: LayerCache, rotary: RotaryTable, window: int | None) -> AttentionInputs:
        key = cache.layout, rotary, window
        inputs = self._inputs.get(key)
        if inputs is None:
            inputs = self._inputs[key] = AttentionInputs(
                self.metadata.tables[cache.table],
                self.rotation(rotary),
                self.plan(cache, window),
                self.cache_rows(cache),
            )
        return inputs

    def rotation(self, table: RotaryTable) -> Rotation:
        rotation = self._rotations.get(table)
        if rotation is None:
            rotation = self._rotations[table] = table(self.positions)
        return rotation

    def plan(self, cache: LayerCache, window: int | None) -> AttentionPlan:
        """The plan of layers with this block table, window and layout of the cache.

        On a GPU a plan depends on the number of KV heads only, so tables and layouts share it.
        """
        return self._plan(cache, cache.tensors[0].shape, window)

    def latent_plan(self, cache: LayerCache, num_heads: int) -> AttentionPlan:
        """The plan of latent layers with this block table, whose rank has `num_heads` heads."""
        num_blocks, block_size, row_size = cache.tensors[0].shape
        groups = 1 if self.positions.is_cpu else head_groups(num_heads)
        return self._plan(cache, torch.Size((num_blocks, groups, block_size, row_size)), None)

    def _plan(self, cache: LayerCache, cache_shape: torch.Size, window: int | None) -> AttentionPlan:
        key = window, cache.layout if self.positions.is_cpu else cache_shape[1]
        plan = self._plans.get(key)
        if plan is None:
            metadata, table = self.metadata, self.metadata.tables[cache.table]
            plan = self._plans[key] = plan_attention(
                metadata.query_start_loc,
                metadata.seq_lens,
                table.block_table,
                metadata.num_decodes,
                cache_shape,
                window,
                decode_width=metadata.decode_width,
                batch_invariant=self.batch_invariant,
                slot_mapping=table.slot_mapping,
                block_stride=cache.tensors[0].stride(0),
                ends=metadata.ends,
            )
        return plan

    def cache_rows(self, cache: LayerCache) -> CacheRows | None:
        """Where layers with this block table and layout of the cache write; None on a GPU, which needs only slots."""
        keys = cache.tensors[0]
        if not keys.is_cpu:
            return None
        rows = self._rows.get(cache.layout)
        if rows is None:
            slots = self.metadata.tables[cache.table].slot_mapping
            rows = self._rows[cache.layout] = cache_rows(slots, keys.shape, keys.stride(0))
        return rows

    def state_plan(self) -> StatePlan | None:
        """Where recurrent layers read and write states; None on a GPU, which needs only `AttentionMetadata.states`."""
        states = self.metadata.states
        assert states is not None
        if not states.read.is_cpu:
            return None
        if not self._state_plans:
            self._state_plans.append(plan_states(self.metadata.query_start_loc, states))
        return self._state_plans[0]
