"""What kernels' launchers ask of the device."""

import torch

HOPPER_MULTIPROCESSORS = 132


def num_multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":  # shapes alone, or the interpreter
        return HOPPER_MULTIPROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
