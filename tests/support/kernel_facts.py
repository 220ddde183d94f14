"""What a compiled kernel uses and what its loops have in flight, without a GPU, from Triton's output."""

import json
import re
import subprocess
import tempfile
from dataclasses import dataclass, field
from typing import Any

from triton import knobs
from triton.backends.compiler import GPUTarget

from proa_engine.kernels.variants import Variant

REGISTERS = 65536  # of a multiprocessor
RESERVED_SHARED_BYTES = 1024  # of each program
TENSOR_COLUMNS = 512  # of tensor memory, since Blackwell


@dataclass(frozen=True, slots=True)
class Gpu:
    """A kind of GPU, with its multiprocessors' limits (CUDA programming guide, compute capabilities)."""

    name: str
    capability: int  # compute capability times 10
    multiprocessors: int
    threads: int
    programs: int
    shared_bytes: int

    @property
    def target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    @property
    def most_shared_bytes(self) -> int:
        """That one program can have."""
        return self.shared_bytes - RESERVED_SHARED_BYTES


HOPPER = Gpu("Hopper", 90, 132, threads=2048, programs=32, shared_bytes=228 * 1024)
GPUS = {
    gpu.capability: gpu
    for gpu in (
        Gpu("an A100", 80, 108, threads=2048, programs=32, shared_bytes=164 * 1024),
        Gpu("an L4", 89, 58, threads=1536, programs=24, shared_bytes=100 * 1024),
        HOPPER,
        Gpu("a B200", 100, 148, threads=2048, programs=32, shared_bytes=228 * 1024),
        Gpu("an RTX PRO 6000 (Blackwell)", 120, 188, threads=1536, programs=24, shared_bytes=100 * 1024),
    )
}

# Kernels whose time is that of a layer's matrix products, attention and what lies between them, but for
# `prefill_hopper_kernel`: its copies are not those that are counted, and it is fastest with a few spilled bytes.
HOT = {
    "decode_attention_kernel",
    "delta_rule_chunk_kernel",
    "delta_rule_recurrent_kernel",
    "delta_rule_scan_kernel",
    "few_rows_kernel",
    "gated_group_norm_kernel",
    "gated_rms_norm_kernel",
    "short_conv_kernel",
    "short_conv_replay_kernel",
    "ssd_recurrent_kernel",
    "ssd_scan_kernel",
    "ssd_scores_kernel",
    "prefill_attention_kernel",
    "skinny_fp8_kernel",
    "skinny_gemm_kernel",
    "invariant_linear_kernel",
    "fp4_matmul_kernel",
    "fp8_block_matmul_kernel",
    "int_matmul_kernel",
    "int8_matmul_kernel",
    "moe_few_down_matmul_kernel",
    "moe_few_gate_matmul_kernel",
    "moe_skinny_down_kernel",
    "moe_skinny_gate_kernel",
    "moe_int_matmul_kernel",
    "moe_matmul_kernel",
    "moe_fp4_matmul_kernel",
    "rms_norm_kernel",
    "router_kernel",
    "rotate_and_cache_kernel",
    "activate_and_mul_kernel",
    "quantize_int8_kernel",
    "quantize_kernel",
}
HOT_TYPES = ("*bf16", "*fp8e4nv", "*i8")  # of a kernel's first argument: of the models that are benchmarked

_TENSOR_CORES = {"tcgen05": "tcgen05.mma", "wgmma": "wgmma.mma_async", "mma": "mma.sync"}
_USAGE = re.compile(r"REG:(\d+) STACK:(\d+)")
_WAIT = re.compile(r"ttg\.async_wait .*num = (\d+)")
_PRODUCT = re.compile(r"\b(tt\.dot|ttng\.warp_group_dot) ")


@dataclass(frozen=True, slots=True)
class KernelFacts:
    kernel: str
    capability: int  # a key of `GPUS`
    constants: dict[str, Any]
    types: list[str]  # of the pointers, in Triton's names
    registers: int  # of a thread
    spilled_bytes: int  # of a thread
    shared_bytes: int  # of a program
    num_warps: int
    copies_in_flight: list[int]  # see `copies_in_flight`
    tensor_cores: str  # "tcgen05", "wgmma", "mma" or ""
    tensor_columns: int  # of tensor memory

    @property
    def is_hot(self) -> bool:
        return self.kernel in HOT and self.types[0] in HOT_TYPES

    @property
    def num_programs(self) -> int:
        """Programs that a multiprocessor runs at once."""
        gpu = GPUS[self.capability]
        threads = 32 * self.num_warps
        registers = -(-self.registers // 8) * 8 * threads
        shared = self.shared_bytes + RESERVED_SHARED_BYTES
        of_tensors = TENSOR_COLUMNS // self.tensor_columns if self.tensor_columns else gpu.programs
        return min(REGISTERS // registers, gpu.threads // threads, gpu.shared_bytes // shared, of_tensors, gpu.programs)

    @property
    def is_too_large(self) -> bool:
        """Whether the GPU cannot start a program of it."""
        return self.shared_bytes > GPUS[self.capability].most_shared_bytes or self.tensor_columns > TENSOR_COLUMNS


def facts_of(variant: Variant, gpu: Gpu) -> KernelFacts:
    """Compile the variant for a GPU, or load it from Triton's cache."""
    compiled = variant.compile(gpu.target)
    specialization = json.loads(variant.specialization)
    names = list(specialization["signature"])
    keys = (names[position] for (position,) in specialization["constant_keys"])
    registers, spilled_bytes = _usage(compiled.asm["cubin"])
    ptx = compiled.asm["ptx"]
    return KernelFacts(
        kernel=variant.name.rpartition(".")[2],
        capability=gpu.capability,
        constants=dict(zip(keys, specialization["constant_vals"], strict=True)),
        types=[kind for kind in specialization["signature"].values() if kind.startswith("*")],
        registers=registers,
        spilled_bytes=spilled_bytes,
        shared_bytes=compiled.metadata.shared,
        num_warps=compiled.metadata.num_warps,
        copies_in_flight=copies_in_flight(compiled.asm["ttgir"]),
        tensor_cores=next((name for name, sign in _TENSOR_CORES.items() if sign in ptx), ""),
        tensor_columns=compiled.metadata.tmem_size or 0,
    )


def _usage(cubin: bytes) -> tuple[int, int]:
    """Registers, and bytes of the stack, of a thread. Triton's kernels have no stack but for spilled registers."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = _USAGE.search(output)
    assert found is not None, output
    return int(found[1]), int(found[2])


@dataclass(slots=True)
class _Loop:
    indent: int
    waits: list[int] = field(default_factory=list)
    has_product: bool = False


def copies_in_flight(ttgir: str) -> list[int]:
    """For each loop that multiplies matrices, the fewest asynchronous copies that one of its waits leaves in flight.

    0 if a wait leaves none, or if the loop copies nothing asynchronously: it then waits for the memory's latency each
    time around.
    """
    found: list[int] = []
    loops: list[_Loop] = []  # around the line, the innermost last
    for line in ttgir.splitlines():
        code = line.lstrip()
        indent = len(line) - len(code)
        if "scf.for" in code:
            loops.append(_Loop(indent))
        elif loops and indent == loops[-1].indent and code.startswith("}"):
            loop = loops.pop()
            if loop.has_product:
                found.append(min(loop.waits, default=0))
        elif loops:
            loops[-1].waits += [int(count) for count in _WAIT.findall(code)]
            loops[-1].has_product |= _PRODUCT.search(code) is not None
    return found
