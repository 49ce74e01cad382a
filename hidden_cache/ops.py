"""`torch.ops.hscache`: the native operators, their fake kernels and typed wrappers.

Importing this module loads them. They are stateless, run on torch's intra-op threads (CPU) or on
the current stream (CUDA), and take strided views of a paged cache,
`[num_blocks, num_layers, block_size, hidden]`, of which only the last dimension need be contiguous.

**Where tokens lie** is said by a block table (`block_ids`, `[n]`, in token order) or token by
token by a slot mapping (`slot_mapping`, `[n]`, `block * block_size + place in the block`), int32 or
int64, on the CPU or on `paged`'s device. Negative slots are padding: a gather fills their rows with
zeros, a write leaves them out.

**Ids outside the cache** raise IndexError before anything is read or written, where they lie on the
CPU. Where they lie on a GPU nothing waits for them: the kernel touches no memory outside the cache,
fills the rows of a gather with bytes 0xFF (NaN in float dtypes), and the next operator on that
device, outside of CUDA graph capture, raises IndexError. Only ids on the GPU can be captured.

**Conversion** is fused in, between float32, float16 and bfloat16, and between them and rows (not
caches) of float8_e4m3fn, rounding to nearest even. A float8 row has one float32 scale: its largest
finite magnitude over 448. Its elements are `row / scale`; infinities become NaN.

All raise ValueError for a shape, dtype, device or layout that they do not take. All are thread-safe
and run without the GIL. `docs/data-plane.md` tells how they work.
"""

from __future__ import annotations

from pathlib import Path

import torch

torch.ops.load_library(str(Path(__file__).with_name("_ops.so")))  # type: ignore[no-untyped-call]


def gather_paged(
    paged: torch.Tensor,
    block_ids: torch.Tensor,
    start: int,
    length: int,
    dtype: torch.dtype | None = None,
    *,
    scales_out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Gathers tokens `[start, start + length)` of one request, all layers, into one new tensor.

    Args:
        paged: any strides before the last, any dtype of 1, 2, 4 or 8 bytes.
        block_ids: may be longer than needed and may repeat ids.
        start: first token.
        length: number of tokens; may be 0.
        dtype: of the result; `paged`'s where absent.
        scales_out: the rows' scales, `[length, num_layers]` float32 of any strides, written; given
            where, and only where, `dtype` is float8_e4m3fn and `paged` is not.

    Returns:
        `[length, num_layers, hidden]`, contiguous, on `paged`'s device.

    Raises:
        IndexError: a range longer than the block table, a block id outside the cache.
    """
    given = {} if scales_out is None else {"scales_out": scales_out}
    return torch.ops.hscache.gather_paged(  # type: ignore[no-any-return]
        paged, block_ids, start, length, dtype, **given
    )


def scatter_paged_(
    paged: torch.Tensor,
    block_ids: torch.Tensor,
    start: int,
    rows: torch.Tensor,
    *,
    scales: torch.Tensor | None = None,
) -> None:
    """Writes rows to tokens `[start, start + len(rows))` of one request: gather_paged backwards.

    Args:
        paged: written in place; what is not one of these tokens stays as it is.
        block_ids: no block that the tokens touch may repeat.
        start: first token.
        rows: `[length, num_layers, hidden]` on `paged`'s device, hidden contiguous, not in
            `paged`'s own memory.
        scales: the rows' scales, `[length, num_layers]` float32 of any strides; given where, and
            only where, `rows` is float8_e4m3fn and `paged` is not.
    """
    torch.ops.hscache.scatter_paged_(paged, block_ids, start, rows, scales=scales)


def gather_slots(
    paged: torch.Tensor,
    slot_mapping: torch.Tensor,
    dtype: torch.dtype | None = None,
    *,
    scales_out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Gathers the rows of any tokens, in the order of the mapping: `[n, num_layers, hidden]`.

    As gather_paged, with a slot mapping in place of block table and range.
    """
    given = {} if scales_out is None else {"scales_out": scales_out}
    return torch.ops.hscache.gather_slots(  # type: ignore[no-any-return]
        paged, slot_mapping, dtype, **given
    )


def write_slots_(
    paged: torch.Tensor,
    slot_mapping: torch.Tensor,
    rows: torch.Tensor,
    *,
    scales: torch.Tensor | None = None,
) -> None:
    """Writes rows `[n, num_layers, hidden]` to the slots of the mapping: gather_slots backwards.

    As scatter_paged_, with a slot mapping in place of block table and start. No slot that is not
    padding may repeat.
    """
    torch.ops.hscache.write_slots_(paged, slot_mapping, rows, scales=scales)


def _check_devices(paged: torch.Tensor, ids: torch.Tensor, *others: torch.Tensor | None) -> None:
    for other in others:
        if other is not None and other.device != paged.device:
            raise ValueError(f"a tensor is on {other.device}, must be on paged's {paged.device}")
    if ids.device != paged.device and ids.device.type != "cpu":
        raise ValueError(f"the ids are on {ids.device}, must be on {paged.device} or the CPU")


@torch.library.register_fake("hscache::gather_paged.scaled")  # type: ignore[untyped-decorator]
@torch.library.register_fake("hscache::gather_paged")  # type: ignore[untyped-decorator]
def _gather_paged_fake(
    paged: torch.Tensor,
    block_ids: torch.Tensor,
    start: int,
    length: int,
    dtype: torch.dtype | None = None,
    *,
    scales_out: torch.Tensor | None = None,
) -> torch.Tensor:
    _check_devices(paged, block_ids, scales_out)
    return paged.new_empty((length, paged.size(1), paged.size(3)), dtype=dtype)


@torch.library.register_fake("hscache::scatter_paged_")  # type: ignore[untyped-decorator]
def _scatter_paged_fake(
    paged: torch.Tensor,
    block_ids: torch.Tensor,
    start: int,
    rows: torch.Tensor,
    *,
    scales: torch.Tensor | None = None,
) -> None:
    _check_devices(paged, block_ids, rows, scales)


@torch.library.register_fake("hscache::gather_slots.scaled")  # type: ignore[untyped-decorator]
@torch.library.register_fake("hscache::gather_slots")  # type: ignore[untyped-decorator]
def _gather_slots_fake(
    paged: torch.Tensor,
    slot_mapping: torch.Tensor,
    dtype: torch.dtype | None = None,
    *,
    scales_out: torch.Tensor | None = None,
) -> torch.Tensor:
    _check_devices(paged, slot_mapping, scales_out)
    return paged.new_empty((slot_mapping.size(0), paged.size(1), paged.size(3)), dtype=dtype)


@torch.library.register_fake("hscache::write_slots_")  # type: ignore[untyped-decorator]
def _write_slots_fake(
    paged: torch.Tensor,
    slot_mapping: torch.Tensor,
    rows: torch.Tensor,
    *,
    scales: torch.Tensor | None = None,
) -> None:
    _check_devices(paged, slot_mapping, rows, scales)
