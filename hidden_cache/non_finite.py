"""Whether rows hold an infinity or a NaN, at a small part of what writing them costs."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

# What a number is as a whole number of its size without its sign, from where on it is none: all
# exponent bits set, or for float8_e4m3fn, which has no infinity, all bits.
_FIRST_NON_FINITE = {
    torch.float64: 0x7FF0_0000_0000_0000,
    torch.float32: 0x7F80_0000,
    torch.float16: 0x7C00,
    torch.bfloat16: 0x7F80,
    torch.float8_e5m2: 0x7C,
    torch.float8_e4m3fn: 0x7F,
}


def count_non_finite(rows: torch.Tensor) -> tuple[int, int]:
    """Counts rows that hold an infinity or a NaN. Exact; no float is computed with.

    Two passes of a maximum over the bits, without memory of their own, on the calling thread alone.
    `torch.isfinite` takes longer than the write itself (`python -m benchmarks files`), and threads
    that the engine needs.

    Args:
        rows: `[n, layers, hidden]`, contiguous, on the CPU, float64 to float8.

    Returns:
        How many rows (of one token and layer) there are, and the first token that has one; 0 and 0
        where all numbers are finite.
    """
    if rows.numel() == 0:
        return 0, 0
    limit, size = _FIRST_NON_FINITE[rows.dtype], rows.dtype.itemsize
    raw: Any = rows.view(torch.uint8).numpy()
    # A positive number is largest among the signed, a negative one among the unsigned.
    signed, unsigned = raw.view(f"i{size}"), raw.view(f"u{size}")
    sign = 1 << (8 * size - 1)
    if signed.max() < limit and unsigned.max() < sign | limit:
        return 0, 0
    bad = (signed.max(axis=-1) >= limit) | (unsigned.max(axis=-1) >= np.uint64(sign | limit))
    tokens = np.flatnonzero(bad.any(axis=-1))
    return int(bad.sum()), int(tokens[0])
