"""Gathers of random layouts against plain torch indexing: the operator, and engine with pool."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hidden_cache.ops
from hidden_cache import _native

# The same layouts in every run, so that a failure is a change's and not luck's.
stable = settings(max_examples=1250, derandomize=True, deadline=None, database=None)

SLOT_BYTES = 256
NUM_SLOTS = 128


@dataclass(frozen=True)
class Layout:
    """A paged cache in some order and padding of its axes, and a request in it."""

    paged: torch.Tensor
    block_ids: list[int]
    start: int
    length: int

    def expected(self) -> torch.Tensor:
        """`[length, layers, hidden]` by plain indexing."""
        tokens = torch.arange(self.start, self.start + self.length)
        block_size = self.paged.shape[2]
        blocks = torch.tensor(self.block_ids, dtype=torch.int64)[tokens // block_size]
        return self.paged[blocks, :, tokens % block_size]


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    blocks, layers, block_size, hidden = (draw(st.integers(1, most)) for most in (8, 4, 6, 7))
    dtype = draw(st.sampled_from([torch.uint8, torch.int16, torch.int32, torch.int64]))
    sizes = [blocks, layers, block_size]
    strides = [0, 0, 0]
    extent = hidden
    for axis in draw(st.permutations(range(3))):
        strides[axis] = extent + draw(st.integers(0, 2))
        extent = strides[axis] * sizes[axis]
    offset = draw(st.integers(0, 3))
    memory = torch.arange(offset + extent).to(dtype)
    paged = memory.as_strided([*sizes, hidden], [*strides, 1], offset)

    # Runs of neighbours between jumps, as an allocator leaves them.
    runs = draw(st.lists(st.tuples(st.integers(0, blocks - 1), st.integers(1, 4)), max_size=4))
    block_ids = [(first + i) % blocks for first, count in runs for i in range(count)]
    tokens = len(block_ids) * block_size
    start = draw(st.integers(0, tokens))
    return Layout(paged, block_ids, start, draw(st.integers(0, tokens - start)))


@stable
@given(layout=layouts(), narrow=st.booleans())
def test_operator_equals_indexing(layout: Layout, narrow: bool) -> None:
    ids = torch.tensor(layout.block_ids, dtype=torch.int32 if narrow else torch.int64)
    rows = hidden_cache.ops.gather_paged(layout.paged, ids, layout.start, layout.length)
    assert torch.equal(rows, layout.expected())


@pytest.fixture(scope="module")
def pool() -> _native.SlotPool:
    return _native.SlotPool(_native.Arena(SLOT_BYTES * NUM_SLOTS), SLOT_BYTES)


@pytest.fixture(scope="module")
def engine() -> Iterator[_native.TransferEngine]:
    engine = _native.TransferEngine(staging_bytes=200)  # less than most requests
    yield engine
    engine.close()


@stable
@given(layout=layouts(), cut=st.integers(0, 100))
def test_engine_and_pool_equal_indexing(
    engine: _native.TransferEngine,
    pool: _native.SlotPool,
    layout: Layout,
    cut: int,
) -> None:
    paged, start, length = layout.paged, layout.start, layout.length
    blocks, layers, block_size, hidden = paged.shape
    item = paged.element_size()
    row_bytes = hidden * item
    block_stride, layer_stride, token_stride, _ = (item * stride for stride in paged.stride())
    view = _native.PagedView(
        paged.data_ptr(),
        (blocks, layers, block_size),
        row_bytes,
        (block_stride, layer_stride, token_stride),
    )
    rows_in_slot = SLOT_BYTES // row_bytes
    firsts = range(0, length, rows_in_slot)
    slots = pool.allocate(layers * len(firsts))
    assert slots is not None
    by_layer = [slots[i * len(firsts) : (i + 1) * len(firsts)] for i in range(layers)]
    pieces = [
        (layer, start + first, min(rows_in_slot, length - first), slot, 0)
        for layer in range(layers)
        for first, slot in zip(firsts, by_layer[layer], strict=True)
    ]
    ticket = engine.gather(view, layout.block_ids, pieces, pool)
    assert ticket is not None
    ticket.wait()
    assert ticket.error is None

    out = torch.zeros(length, layers, hidden, dtype=paged.dtype)
    middle = length * cut // 100  # two reads, so that they begin and end inside slots
    for begin, end in ((0, middle), (middle, length)):
        for layer in range(layers):
            pool.read_rows(
                by_layer[layer],
                row_bytes,
                begin,
                end - begin,
                out[begin:, layer].data_ptr(),
                layers * row_bytes,
            )
    pool.free(slots)
    assert torch.equal(out, layout.expected())
