"""RoutingHints: what a routing policy knows about one request."""

from collections.abc import Sequence
from dataclasses import dataclass

from proa.blocks import root_hash
from proa.contract import Lora, ModelInfo


@dataclass(frozen=True, slots=True)
class HashChain:
    """Parameters of an engine's block hashes (`proa.blocks`). Engines with equal chains hash equal prompts alike."""

    root: bytes  # hash of model and revision: the parent hash of a prompt's first block
    block_size: int  # tokens


def hash_chain(model: ModelInfo) -> HashChain:
    return HashChain(root_hash(model.model, model.revision), model.block_size)


@dataclass(frozen=True, slots=True)
class RoutingHints:
    """`block_hashes` are those of the prompt's full blocks, in order. Empty if the policy does not use them."""

    block_hashes: Sequence[bytes] = ()
    chain: HashChain | None = None  # of `block_hashes`; None if these are not computed
    num_prompt_tokens: int = 0
    session_id: str | None = None  # the client's own name for its conversation, for session affinity
    lora: Lora | None = None  # the adapter; without a digest, no engine has loaded it yet

    @property
    def num_reusable(self) -> int:
        """How many blocks a cache hit can save: a prompt's last token is always computed, so a full last block is not
        one."""
        return 0 if self.chain is None else max(0, self.num_prompt_tokens - 1) // self.chain.block_size

    @property
    def reusable(self) -> Sequence[bytes]:
        return self.block_hashes[: self.num_reusable]
