"""`torch.ops.hscache`: the native operators, their fake kernels and typed wrappers.

Importing this module loads them. They are stateless, run on the current stream, and take strided
views of a paged cache, `[num_blocks, num_layers, block_size, hidden]`, of which only the last
dimension need be contiguous.
"""

from __future__ import annotations

from pathlib import Path

import torch

torch.ops.load_library(str(Path(__file__).with_name("_ops.so")))  # type: ignore[no-untyped-call]


def gather_paged(
    paged: torch.Tensor, block_ids: torch.Tensor, start: int, length: int
) -> torch.Tensor:
    """Gathers tokens `[start, start + length)` of one request, all layers, into one new tensor.

    Args:
        paged: `[num_blocks, num_layers, block_size, hidden]`, any strides before the last, any
            dtype of 1, 2, 4 or 8 bytes, on the CPU.
        block_ids: `[n]` int32 or int64 on the CPU, in token order; may be longer than needed and
            may repeat ids.
        start: first token.
        length: number of tokens; may be 0.

    Returns:
        `[length, num_layers, hidden]`, contiguous, of `paged`'s dtype and device.

    Raises:
        ValueError: a shape, dtype or layout that the operator does not take, a negative start or
            length.
        IndexError: a range longer than the block table, a block id outside the cache. Nothing is
            read then.

    Thread-safe. Runs on torch's intra-op threads, without the GIL.
    """
    return torch.ops.hscache.gather_paged(paged, block_ids, start, length)  # type: ignore[no-any-return]


@torch.library.register_fake("hscache::gather_paged")  # type: ignore[untyped-decorator]
def _gather_paged_fake(
    paged: torch.Tensor, block_ids: torch.Tensor, start: int, length: int
) -> torch.Tensor:
    return paged.new_empty((length, paged.size(1), paged.size(3)))
