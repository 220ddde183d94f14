"""Divide a model of `transformers` among tensor parallel ranks by the plan that the library has for its type.

A plan gives modules and parameters a rule, by name. The library divides the parameters of a model on the meta device,
and its loader reads a rank's shares of them; the collectives of the forward pass are ours: modules around the
library's.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES

from proa_engine.layers.parallel import ParallelContext
from proa_engine.layers.shares import even_share
from proa_engine.models.transformers_adapter.recurrent import Around

Plan = Mapping[str, str]  # name of a module or parameter -> rule

ANY_SIZE = ("colwise_gather_output", "embedding_rowwise")  # ranks may have different shares
QUERY_HEADS = ("q_proj", "q_b_proj", "qkv_proj", "query_key_value")
KEYS = "k_proj"
KEY_HEADS = (KEYS, "v_proj")
MERGED_KEY_HEADS = ("kv_b_proj", "qkv_proj", "query_key_value")


class _Parallel(Around):
    def __init__(self, inner: nn.Module, parallel: ParallelContext) -> None:
        super().__init__(inner)
        self.parallel = parallel


class SummedOutput(_Parallel):
    """Each rank computes an addend of the output: of its inputs, or of its share of every expert."""

    def __init__(self, inner: nn.Module, parallel: ParallelContext) -> None:
        super().__init__(inner, parallel)
        if parallel.rank > 0 and isinstance(inner, nn.Linear):
            inner.register_parameter("bias", None)  # only rank 0 adds it

    def forward(self, x: Tensor, *others: Any, **options: Any) -> Tensor:
        return self.parallel.all_reduce(self.inner(x, *others, **options).contiguous())


class SummedShare(SummedOutput):
    """As `SummedOutput`, of an input that all ranks have whole."""

    def forward(self, x: Tensor, *others: Any, **options: Any) -> Tensor:
        size = x.shape[-1] // self.parallel.world_size
        return super().forward(x.narrow(-1, self.parallel.rank * size, size))


class GatheredOutput(_Parallel):
    """A linear layer of whose outputs each rank computes a range, the last ranks a shorter one."""

    def __init__(self, inner: nn.Linear, parallel: ParallelContext) -> None:
        super().__init__(inner, parallel)
        self.size = inner.out_features  # of all ranks
        self.share = -(-self.size // parallel.world_size)

    def forward(self, x: Tensor) -> Tensor:
        part = self.inner(x)
        whole = self.parallel.all_gather_last_dim(F.pad(part, (0, self.share - part.shape[-1])))
        return whole[..., : self.size].contiguous()


class DividedInput(_Parallel):
    """A module that passes on its input, on every rank, inside of one whose output is summed."""

    def forward(self, x: Tensor, *others: Any, **options: Any) -> Tensor:
        output: Tensor = self.inner(x / self.parallel.world_size, *others, **options)
        return output


class VocabRange(_Parallel):
    """An embedding of which each rank holds a range of rows, the last ranks a shorter one."""

    def __init__(self, inner: nn.Embedding, parallel: ParallelContext) -> None:
        super().__init__(inner, parallel)
        self.start = parallel.rank * -(-inner.num_embeddings // parallel.world_size)
        self.size = len(inner.weight)

    def forward(self, input_ids: Tensor) -> Tensor:
        local = input_ids - self.start
        is_mine = (local >= 0) & (local < self.size)
        vectors: Tensor = self.inner(local.where(is_mine, 0))
        return self.parallel.all_reduce(vectors.masked_fill(~is_mine[..., None], 0))


AROUND: dict[str, Callable[[Any, ParallelContext], nn.Module] | None] = {
    "colwise": None,
    "colwise_gather_output": GatheredOutput,
    "embedding_rowwise": VocabRange,
    "local_params": None,
    "mla_kv_a_proj": None,  # differs in gradients alone, as does the next but one
    "moe_identity_expert": DividedInput,
    "moe_tp_experts": SummedOutput,
    "packed_colwise": None,
    "packed_rowwise": None,
    "replicate": None,
    "replicated_with_grad_allreduce": None,
    "rowwise": SummedOutput,
    "rowwise_split_input": SummedShare,
}


def read_plan(model: Any, parallel: ParallelContext) -> Plan:
    """The plan of `model`, which is on the meta device, for its modules and parameters; empty for one rank.

    Raises ValueError naming what cannot be divided.
    """
    if parallel.world_size == 1:
        return {}
    if not model.config.base_model_tp_plan:
        raise ValueError("transformers has no tensor parallel plan for it, so tensor_parallel_size must be 1")
    plan: Plan = model._expand_parallel_plan(dict(model.tp_plan))
    unknown = sorted(set(plan.values()) - AROUND.keys())
    if unknown:
        raise ValueError(f"the rule {unknown[0]} of its tensor parallel plan is not supported")
    columns = {name.rpartition(".")[2] for name, rule in plan.items() if rule == "colwise"}
    num_heads = getattr(model.config, "num_attention_heads", None)
    if columns & {*QUERY_HEADS} and isinstance(num_heads, int):
        parallel.part(num_heads, "num_attention_heads")
    num_kv_heads = getattr(model.config, "num_key_value_heads", None)
    if columns & {*MERGED_KEY_HEADS} and isinstance(num_kv_heads, int):
        parallel.part(num_kv_heads, "num_key_value_heads")
    for name, rule in plan.items():
        if rule == "colwise":
            _num_copies(model, name, parallel)  # for its errors
    return plan


def divide(model: Any, plan: Plan, parallel: ParallelContext, device: torch.device) -> None:
    """Divide the parameters of `model`, which is on the meta device. Raises ValueError naming one that cannot be."""
    if not plan:
        return
    assert parallel.group is not None
    meshes = {1: DeviceMesh.from_group(parallel.group, device.type)}  # by the number of ranks that hold each part
    for name, rule in plan.items():
        owner, _, last = name.rpartition(".")
        module = model.get_submodule(owner)
        if last not in module._parameters:
            continue
        num_copies = _num_copies(model, owner, parallel) if rule == "colwise" else 1
        if num_copies not in meshes:
            meshes[num_copies] = _mesh_without_copies(parallel, num_copies, device)
        ALL_PARALLEL_STYLES[rule].shard_param(module, last, meshes[num_copies])
        parameter = module._parameters[last]
        if isinstance(parameter, DTensor) and rule not in ANY_SIZE:
            [placement] = parameter.placements
            if not placement.is_replicate():
                even_share(_num_units(parameter, placement), 0, parameter.device_mesh.size(), f"size of {name}")
    for name, rule in plan.items():
        owner, _, last = name.rpartition(".")
        attention = model.get_submodule(owner)
        if rule == "colwise" and last == KEYS and hasattr(attention, "num_key_value_groups"):
            attention.num_key_value_groups //= _num_copies(model, name, parallel)  # for the library's own attention


def _num_copies(model: Any, name: str, parallel: ParallelContext) -> int:
    """Return the number of ranks that hold each KV head of the projection `name`, 1 if it is of another kind.

    Raises ValueError if neither the KV heads are divisible by the ranks nor the ranks by the KV heads.
    """
    owner, _, last = name.rpartition(".")
    if last not in KEY_HEADS:
        return 1
    attention = model.get_submodule(owner)
    head_dim = getattr(attention, "head_dim", None)
    # The layers of a model may have different numbers of KV heads.
    num_kv_heads = getattr(attention, KEYS).out_features // head_dim if head_dim else model.config.num_key_value_heads
    if parallel.world_size % num_kv_heads == 0:
        return int(parallel.world_size // num_kv_heads)
    parallel.part(num_kv_heads, "num_key_value_heads")
    return 1


def _mesh_without_copies(parallel: ParallelContext, num_copies: int, device: torch.device) -> DeviceMesh:
    """Return this rank and others that hold each KV head once, where `num_copies` neighbouring ranks hold one head."""
    assert parallel.group is not None
    ranks = dist.get_process_group_ranks(parallel.group)[parallel.rank % num_copies :: num_copies]
    group = dist.new_group(ranks, use_local_synchronization=True)
    return DeviceMesh.from_group(group, device.type)


def _num_units(parameter: DTensor, placement: Any) -> int:
    """The size along the divided dimension, that of one of the matrices that are packed along it."""
    size: int = parameter.shape[placement.dim]
    return size // int(getattr(placement, "split_factor", 1))


def localize(model: nn.Module) -> None:
    """Replace the divided parameters, which are loaded, by this rank's shares."""
    local: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if isinstance(parameter, DTensor):
                if id(parameter) not in local:
                    local[id(parameter)] = nn.Parameter(parameter.to_local().contiguous(), requires_grad=False)
                module._parameters[name] = local[id(parameter)]


def connect(model: nn.Module, plan: Plan, parallel: ParallelContext) -> None:
    """Add the ranks' collectives to the forward pass of `model`."""
    modules = dict(model.named_modules())
    # Inner modules first, whose names are longer.
    for name in sorted(plan.keys() & modules.keys(), key=len, reverse=True):
        around = AROUND[plan[name]]
        if around is not None:
            owner, _, last = name.rpartition(".")
            setattr(modules[owner], last, around(modules[name], parallel))
