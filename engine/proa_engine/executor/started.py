"""StartedRanks: an engine's model and memory, as its ranks have found them when they can run steps."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from proa.contract import KvTransfer
from proa_engine.core.kv.cache_groups import CacheGroups
from proa_engine.core.kv.host_tier import HostTierConfig
from proa_engine.core.kv.mover import Mover
from proa_engine.core.timing.step_costs import StepCosts
from proa_engine.models.audio_config import AudioConfig
from proa_engine.models.image_config import ImageConfig
from proa_engine.models.pooling_config import PoolingConfig
from proa_engine.observability.progress import gigabytes

if TYPE_CHECKING:
    from proa_engine.memory.kv_cache import WorkerSizes


class LoadedModelConfig(Protocol):
    """The part of `ModelConfig` that an engine needs beside its ranks."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def hidden_size(self) -> int: ...

    @property
    def model_type(self) -> str: ...

    @property
    def has_lm_head(self) -> bool: ...

    @property
    def is_encoder(self) -> bool: ...

    @property
    def pooling(self) -> PoolingConfig: ...

    @property
    def images(self) -> ImageConfig | None: ...

    @property
    def audios(self) -> AudioConfig | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedRanks:
    """What the ranks have in common. It is the same after a sleep."""

    description: str  # the model, its types and the device
    model_config: LoadedModelConfig
    max_model_len: int  # at most as configured
    max_num_seqs: int  # at most as configured: fewer if states of recurrent layers take too much memory
    eos_token_ids: frozenset[int]
    cache_groups: CacheGroups
    step_costs: StepCosts  # as timed in the warm-up
    on_gpu: bool = False
    replays_decodes: bool = False  # a step of decodes alone is replayed as a CUDA graph
    host_tier: HostTierConfig | None = None
    mover: Mover | None = None  # of all ranks
    kv_transfer: KvTransfer | None = None  # how other engines fetch blocks from this one; None: they cannot
    rank_sizes: "Sequence[WorkerSizes]" = ()  # by rank

    def __str__(self) -> str:
        """Return a text for the log: what the model is, and which memory it has."""
        ranks = f" x {len(self.rank_sizes)}" if len(self.rank_sizes) > 1 else ""
        weights = gigabytes(sum(sizes.weight_bytes for sizes in self.rank_sizes))
        return f"{self.description}{ranks}, {weights} GB of weights, {self._describe_cache()}"

    def _describe_cache(self) -> str:
        groups, max_model_len = self.cache_groups, self.max_model_len
        num_requests = groups.concurrency(max_model_len)
        text = f"KV cache of {int(num_requests * max_model_len):,} tokens, enough for {num_requests:.1f} requests of "
        text += f"{max_model_len:,} tokens"
        if groups.windows:
            text += f", {len(groups.windows)} tables of windows"
        if self.host_tier is not None:
            text += f", {self.host_tier.num_pages * groups.block_size:,} tokens in host memory"
        if groups.num_state_slots:
            text += f", {groups.num_state_slots} states, at most {self.max_num_seqs} requests at a time"
        return text
