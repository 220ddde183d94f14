"""Integer arithmetic of launches. Triton's own functions also run in kernels and take 2 us a call on the host."""


def cdiv(n: int, d: int) -> int:
    """n / d, rounded up; d > 0"""
    return -(-n // d)


def next_power_of_2(n: int) -> int:
    """The smallest power of two of at least n; n > 0"""
    return 1 << (n - 1).bit_length()
