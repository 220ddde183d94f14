"""How many ranks can share a model's heads. Does not import torch, so that it is known before the start."""


def check_head_count(num_heads: int, num_ranks: int, what: str) -> None:
    """Raise ValueError, naming `what`, if there are fewer heads than ranks."""
    if num_heads < num_ranks:
        raise ValueError(
            f"{what} ({num_heads}) are fewer than tensor_parallel_size ({num_ranks}), which can be at most {num_heads}"
        )
