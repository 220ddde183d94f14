"""Programmatic dependent launch (CUDA, Hopper and later): a kernel starts while the previous kernel ends.

A kernel with the constant PDL begins with `gdc_launch_dependents` if that is set: once all of its programs have
started, the next kernel's programs may start on free multiprocessors, load what no kernel writes (weights), and wait.
`gdc_wait` returns when the previous kernel has ended and its writes are visible. Every program must call it before it
reads or writes memory that the step's kernels write, and must call it even if it does neither, because the next kernel
takes this kernel's end as the end of all earlier ones. Ordinary kernels wait for these kernels, and these for them.

PROA_DEPENDENT_LAUNCH=0 in the environment turns it off, in all processes of an engine: to find out whether a hang or a
wrong result comes from it.
"""

import os
from typing import Any

from triton.runtime import driver

FIRST_CAPABILITY = 90
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_IS_OFF = os.environ.get("PROA_DEPENDENT_LAUNCH") == "0"


def dependent_launch() -> dict[str, Any]:
    """Return what the launch of a kernel with the constant PDL needs: the constant and Triton's option."""
    if INTERPRETED or _IS_OFF or driver.active.get_current_target().arch < FIRST_CAPABILITY:
        return {"PDL": False}
    return {"PDL": True, "launch_pdl": True}
