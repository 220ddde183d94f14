"""GGUF's quantized types (llama.cpp's ggml) that can be read. Does not import torch, which takes seconds."""

# The values of a block, which lie next to each other in a row, and its bytes.
BLOCKS = {
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
}
# The bits in which numbers can stay integers. Q6_K's groups of 16 are too small for the kernels.
INTEGER_BITS = {"Q4_0": 4, "Q4_1": 4, "Q4_K": 4, "Q5_0": 8, "Q5_1": 8, "Q5_K": 8, "Q8_0": 8}
