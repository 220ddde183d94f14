"""Programmatic dependent launch: a kernel starts while the one before it ends, and itself waits for what that writes.

Hopper and later have it. A kernel that is launched with `dependent_launch` begins with `gdc_launch_dependents`: as soon
as all of its programs have begun, the next kernel's take what room is left, fetch what no kernel writes (weights), and
wait. `gdc_wait` returns when the kernel before has ended and its memory can be read. Every program must come to it
before it reads or writes anything that kernels of the step write, and even if it does neither: the kernel after this
one takes this one's end for the end of all before. An ordinary kernel waits for all of these, and they for it.
"""

import os
from functools import cache
from typing import Any

import triton

FIRST_CAPABILITY = 90
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def dependent_launch() -> dict[str, Any]:
    """Keyword arguments of a launch, for a kernel with the constant PDL."""
    if INTERPRETED or not _is_known(triton.runtime.driver.active):
        return {"PDL": False}
    return {"PDL": True, "launch_pdl": True}


@cache
def _is_known(driver: Any) -> bool:
    """To the driver's GPU. Asking that takes longer than all else of a launch, and it does not change."""
    return bool(driver.get_current_target().arch >= FIRST_CAPABILITY)
