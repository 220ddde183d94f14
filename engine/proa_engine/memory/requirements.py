"""What a model needs of the machine and of the configuration: decided from numbers, so that the checks before the start
and the worker decide alike. Does not import torch.

Raises ValueError naming the option to change.
"""

from proa_engine.memory.host import HostMemory


def weights_room(memory: HostMemory, ranks_here: int) -> int:
    """Return the bytes that one rank's weights may take on a CPU, where `ranks_here` ranks share the container or
    machine.

    `memory` is the state before any rank has loaded weights.
    """
    limit = memory.available if memory.limit is None else min(memory.limit, memory.available)
    return limit // ranks_here


def check_weights(weight_bytes: int, room: int) -> None:
    """Raise `ValueError` if the weights take more than `room` bytes."""
    if weight_bytes > room:
        raise ValueError(
            f"the model's weights take {gib(weight_bytes)} on this rank, but it has {gib(room)} of memory: give the "
            "engine more, take a smaller dtype or a smaller model, or more ranks in containers of their own "
            "(tensor_parallel_size)"
        )


def check_gpu_weights(weight_bytes: int, memory: int, utilization: float) -> None:
    """Raise `ValueError` if the weights take more than the engine may use of a GPU with `memory` bytes."""
    if weight_bytes > memory * utilization:
        raise ValueError(
            f"the model's weights take at least {gib(weight_bytes)} on a rank, but a GPU here has {gib(memory)}, of "
            f"which gpu_memory_utilization allows {utilization:.0%}: quantize the weights (quantization), share them "
            "among more GPUs (tensor_parallel_size), or take a smaller model"
        )


def check_max_model_len(max_model_len: int | None, positions: int) -> None:
    """Raise `ValueError` if a request of `max_model_len` tokens is longer than the model's positions."""
    if max_model_len is not None and max_model_len > positions:
        raise ValueError(f"max_model_len {max_model_len} is more than the model's {positions} positions")


def gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
