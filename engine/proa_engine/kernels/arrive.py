"""Split kernels: several programs store parts of one result, and the last one to end combines them.

Which one that is changes from launch to launch, so it combines all parts, its own too, in a fixed order, and reads them
from the L2 cache (`cache_modifier=".cg"`): other multiprocessors wrote them. A counter, 0 before the launch, counts the
parts that are stored. Who combines them clears it for the next launch, or an earlier kernel does.
"""

import triton
import triton.language as tl


@triton.jit
def arrive(arrived_ptr, count, num_parts):
    """Count `count` parts that this program has stored. Returns whether all `num_parts` now are."""
    # Every thread's stores come before the release, and every thread's loads after the acquire.
    tl.debug_barrier()
    num_arrived = tl.atomic_add(arrived_ptr, count, sem="acq_rel", scope="gpu")
    tl.debug_barrier()
    return num_arrived + count == num_parts
