"""What an engine says of itself: the answer to GetModelInfo and the body of Hello, without protobuf."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """The model and the limits, fixed once it is loaded."""

    instance_id: str  # drawn at each start of the engine
    model_name: str
    model: str
    revision: str
    max_model_len: int
    vocab_size: int
    block_size: int
    num_gpu_blocks: int
    block_hash_version: int
    tokenizer_digest: str  # empty: there is no tokenizer
    eos_token_ids: tuple[int, ...]
    max_num_seqs: int
    max_num_batched_tokens: int
    max_logprobs: int
    max_waiting_requests: int
    prefix_caching: bool
    engine_version: str
