"""Properties of the device that kernel launchers need."""

import torch

HOPPER_MULTIPROCESSORS = 132


def num_multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":  # meta tensors or the interpreter
        return HOPPER_MULTIPROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
