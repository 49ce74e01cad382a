"""`torch.ops.hscache` against plain torch indexing, what it refuses, and what torch asks of it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import hidden_cache.ops

BLOCKS, LAYERS, BLOCK_SIZE, HIDDEN = 6, 3, 4, 8

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
    torch.uint16,
    torch.int16,
    torch.float16,
    torch.bfloat16,
    torch.uint32,
    torch.int32,
    torch.float32,
    torch.complex32,
    torch.uint64,
    torch.int64,
    torch.float64,
    torch.complex64,
]


def make_paged(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """`[BLOCKS, LAYERS, BLOCK_SIZE, HIDDEN]` of random bits."""
    count = BLOCKS * LAYERS * BLOCK_SIZE * HIDDEN
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    if dtype == torch.bool:
        bits = bits & 1
    return bits.view(dtype).view(BLOCKS, LAYERS, BLOCK_SIZE, HIDDEN)


def gather(paged: torch.Tensor, block_ids: torch.Tensor, start: int, length: int) -> torch.Tensor:
    rows: torch.Tensor = torch.ops.hscache.gather_paged(paged, block_ids, start, length)
    return rows


def indexed(paged: torch.Tensor, block_ids: torch.Tensor, start: int, length: int) -> torch.Tensor:
    """The same rows by plain indexing, as bytes `[length, layers, row_bytes]`."""
    tokens = torch.arange(start, start + length)
    block_size = paged.shape[2]
    blocks = block_ids.long()[tokens // block_size]
    return as_bytes(paged)[blocks, :, tokens % block_size]


def as_bytes(rows: torch.Tensor) -> torch.Tensor:
    return rows.view(torch.uint8)


IDS = torch.tensor([4, 1, 5])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_keeps_its_bits(dtype: torch.dtype) -> None:
    paged = make_paged(dtype)
    rows = gather(paged, IDS, 1, 10)
    assert rows.dtype == dtype
    assert rows.shape == (10, LAYERS, HIDDEN)
    assert rows.is_contiguous()
    assert torch.equal(as_bytes(rows), indexed(paged, IDS, 1, 10))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_block_ids_of_both_widths(dtype: torch.dtype) -> None:
    paged = make_paged()
    ids = IDS.to(dtype)
    assert torch.equal(as_bytes(gather(paged, ids, 2, 9)), indexed(paged, ids, 2, 9))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_strided_block_ids(dtype: torch.dtype) -> None:
    paged = make_paged()
    table = torch.stack([IDS, torch.full((3,), 99)], dim=1).to(dtype)  # a column of a batch
    assert torch.equal(as_bytes(gather(paged, table[:, 0], 0, 12)), indexed(paged, IDS, 0, 12))
    assert torch.equal(as_bytes(gather(paged, table[:1, 0], 0, 4)), indexed(paged, IDS, 0, 4))


@pytest.mark.parametrize(
    ("start", "length"),
    [(0, 0), (12, 0), (0, 1), (11, 1), (3, 2), (4, 4), (0, 12), (0, 9), (7, 5)],
)
def test_token_ranges(start: int, length: int) -> None:
    paged = make_paged()
    rows = gather(paged, IDS, start, length)
    assert rows.shape == (length, LAYERS, HIDDEN)
    assert torch.equal(as_bytes(rows), indexed(paged, IDS, start, length))


def test_a_table_may_be_longer_than_needed_with_anything_in_it() -> None:
    paged = make_paged()
    ids = torch.tensor([-1, 4, 1, 10**12])
    assert torch.equal(as_bytes(gather(paged, ids, 4, 8)), indexed(paged, IDS, 0, 8))


def test_ids_may_repeat() -> None:
    paged = make_paged()
    ids = torch.tensor([2, 2, 3, 2])
    assert torch.equal(as_bytes(gather(paged, ids, 1, 14)), indexed(paged, ids, 1, 14))


def test_nothing_of_an_empty_table() -> None:
    empty = torch.tensor([], dtype=torch.int64)
    assert gather(make_paged(), empty, 0, 0).shape == (0, LAYERS, HIDDEN)


def strided_views() -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    """Makers of a view equal to a contiguous paged cache, by the layout of their memory."""

    def in_order(*axes: int) -> Callable[[torch.Tensor], torch.Tensor]:
        inverse = [axes.index(i) for i in range(4)]
        return lambda paged: paged.permute(axes).contiguous().permute(inverse)

    def padded(paged: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(BLOCKS, LAYERS, BLOCK_SIZE + 1, HIDDEN + 3, dtype=paged.dtype)
        view = out[:, :, :BLOCK_SIZE, 2 : 2 + HIDDEN]
        view.copy_(paged)
        return view

    return {
        "token-major": in_order(0, 2, 1, 3),
        "layer-outermost": in_order(1, 0, 2, 3),
        "block-innermost": in_order(2, 1, 0, 3),
        "padded": padded,
    }


@pytest.mark.parametrize("layout", strided_views())
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16], ids=str)
def test_strides(layout: str, dtype: torch.dtype) -> None:
    paged = make_paged(dtype)
    view = strided_views()[layout](paged)
    assert not view.is_contiguous()
    assert torch.equal(as_bytes(gather(view, IDS, 1, 10)), indexed(paged, IDS, 1, 10))


def test_an_expanded_view() -> None:
    paged = make_paged()[:, :1].expand(BLOCKS, LAYERS, BLOCK_SIZE, HIDDEN)
    rows = gather(paged, IDS, 1, 10)
    assert torch.equal(as_bytes(rows), indexed(paged.contiguous(), IDS, 1, 10))


def test_a_lazily_conjugated_view() -> None:
    paged = torch.view_as_complex(
        make_paged(torch.int8).float().view(*make_paged().shape[:3], 4, 2)
    )
    assert torch.equal(gather(paged.conj(), IDS, 0, 12), gather(paged, IDS, 0, 12).conj())


def test_hidden_of_one_needs_no_stride() -> None:
    paged = make_paged(torch.int32)[..., 3:4].transpose(2, 3).contiguous().transpose(2, 3)
    assert paged.stride(3) != 1
    expected = paged[IDS].transpose(1, 2).reshape(12, LAYERS, 1)
    assert torch.equal(gather(paged, IDS, 0, 12), expected)


def test_no_layers() -> None:
    assert gather(make_paged()[:, :0], IDS, 0, 5).shape == (5, 0, HIDDEN)


def test_a_long_range_is_shared_among_threads() -> None:
    # Far above the bytes that are one task's.
    paged = torch.randn(64, 4, 64, 256)
    ids = torch.randperm(64)
    assert torch.equal(as_bytes(gather(paged, ids, 5, 4000)), indexed(paged, ids, 5, 4000))


def test_callers_may_run_at_once() -> None:
    paged = make_paged()
    expected = indexed(paged, IDS, 1, 10)
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: gather(paged, IDS, 1, 10), range(200)))
    assert all(torch.equal(as_bytes(rows), expected) for rows in results)


REFUSALS: dict[str, tuple[type[Exception], str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "negative start": (
        ValueError,
        r"start is -1, must be 0 or more: pass the first token's position",
        lambda paged: gather(paged, IDS, -1, 2),
    ),
    "negative length": (
        ValueError,
        r"length is -2, must be 0 or more: pass the number of tokens",
        lambda paged: gather(paged, IDS, 0, -2),
    ),
    "range beyond the table": (
        IndexError,
        r"start 3 and length 10 reach beyond the 12 tokens of a table of 3 blocks of 4: "
        r"pass a longer block table",
        lambda paged: gather(paged, IDS, 3, 10),
    ),
    "range whose end overflows": (
        IndexError,
        r"start 9223372036854775807 and length 9223372036854775807 reach beyond",
        lambda paged: gather(paged, IDS, 2**63 - 1, 2**63 - 1),
    ),
    "block id too large": (
        IndexError,
        r"block_ids\[1\] is 6, outside the paged cache's 6 blocks: pass ids from 0 to 5",
        lambda paged: gather(paged, torch.tensor([0, 6]), 0, 8),
    ),
    "negative block id": (
        IndexError,
        r"block_ids\[0\] is -1, outside the paged cache's 6 blocks",
        lambda paged: gather(paged, torch.tensor([-1], dtype=torch.int32), 0, 1),
    ),
    "block_ids of floats": (
        ValueError,
        r"block_ids has dtype Float, must be int32 or int64: convert it",
        lambda paged: gather(paged, IDS.float(), 0, 1),
    ),
    "block_ids of two dimensions": (
        ValueError,
        r"block_ids has shape \[1, 3\], must be one-dimensional",
        lambda paged: gather(paged, IDS[None], 0, 1),
    ),
    "elements of 16 bytes": (
        ValueError,
        r"elements of 16 bytes, the operator takes dtypes of 1, 2, 4 or 8 bytes: view it as",
        lambda paged: gather(paged.to(torch.complex128), IDS, 0, 1),
    ),
    "last dimension not contiguous": (
        ValueError,
        r"last dimension has stride 8, must be contiguous \(stride 1\): pass the whole tensor",
        lambda paged: gather(paged.transpose(2, 3), IDS, 0, 1),
    ),
    "every second element": (
        ValueError,
        r"last dimension has stride 2, must be contiguous",
        lambda paged: gather(paged[..., ::2], IDS, 0, 1),
    ),
    "three dimensions": (
        ValueError,
        r"paged has shape \[3, 4, 8\], must be \[num_blocks, num_layers, block_size, hidden\]",
        lambda paged: gather(paged[0], IDS, 0, 1),
    ),
    "hidden of 0": (
        ValueError,
        r"paged has shape \[6, 3, 4, 0\]: hidden must be 1 or more",
        lambda paged: gather(paged[..., :0], IDS, 0, 1),
    ),
    "block_size of 0": (
        ValueError,
        r"0 tokens\] .* block_size and row bytes must be at least 1",
        lambda paged: gather(paged[:, :, :0], IDS, 0, 1),
    ),
    "no blocks": (
        IndexError,
        r"block_ids\[0\] is 4, outside the paged cache's 0 blocks",
        lambda paged: gather(paged[:0], IDS, 0, 1),
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals_name_value_limit_and_remedy(case: str) -> None:
    error, text, call = REFUSALS[case]
    with pytest.raises(error, match=text) as caught:
        call(make_paged())
    assert type(caught.value) is error


def scatter(paged: torch.Tensor, rows: torch.Tensor, **scales: torch.Tensor) -> None:
    torch.ops.hscache.scatter_paged_(paged, IDS, 1, rows, **scales)


SLOTS = torch.tensor([17, -1, 4, 23, -7, 0])
ROWS = torch.arange(10 * LAYERS * HIDDEN).view(10, LAYERS, HIDDEN).float()

MORE_REFUSALS: dict[str, tuple[type[Exception], str, Callable[[torch.Tensor], object]]] = {
    "rows of another shape": (
        ValueError,
        r"rows has shape \[10, 3, 7\], must be \[tokens, 3, 8\] for paged of shape \[6, 3, 4, 8\]",
        lambda paged: scatter(paged, ROWS[..., 1:]),
    ),
    "rows of two dimensions": (
        ValueError,
        r"rows has shape \[3, 8\], must be \[tokens, 3, 8\]",
        lambda paged: scatter(paged, ROWS[0]),
    ),
    "rows whose hidden is not contiguous": (
        ValueError,
        r"rows's last dimension has stride 3, must be contiguous \(stride 1\): pass the whole",
        lambda paged: scatter(paged, ROWS.transpose(1, 2).contiguous().transpose(1, 2)),
    ),
    "rows of the cache itself": (
        ValueError,
        r"rows lies in paged's own memory: pass a clone of it",
        lambda paged: scatter(paged, paged[:, :, 0][:5]),
    ),
    "more rows than the table has tokens": (
        IndexError,
        r"start 1 and length 20 reach beyond the 12 tokens",
        lambda paged: scatter(paged, torch.cat([ROWS, ROWS])),
    ),
    "a scatter of integers into floats": (
        ValueError,
        r"rows of Int and a paged cache of Float: caches of float32, float16 and bfloat16 are .*"
        r"use the cache's dtype and convert the rows",
        lambda paged: scatter(paged, ROWS.int()),
    ),
    "a gather of floats as integers": (
        ValueError,
        r"rows of Long and a paged cache of Float: ",
        lambda paged: torch.ops.hscache.gather_paged(paged, IDS, 0, 1, torch.int64),
    ),
    "a float8 cache as floats": (
        ValueError,
        r"rows of Float and a paged cache of Float8_e4m3fn: ",
        lambda paged: torch.ops.hscache.gather_paged(
            paged.to(torch.float8_e4m3fn), IDS, 0, 1, torch.float32
        ),
    ),
    "float8 without scales_out": (
        ValueError,
        r"scales_out is missing: float8 rows have one float32 scale each, pass a tensor of shape",
        lambda paged: torch.ops.hscache.gather_paged(paged, IDS, 0, 1, torch.float8_e4m3fn),
    ),
    "float8 rows without scales": (
        ValueError,
        r"scales is missing: ",
        lambda paged: scatter(paged, ROWS.to(torch.float8_e4m3fn)),
    ),
    "scales that nothing needs": (
        ValueError,
        r"scales is given, but only rows of float8_e4m3fn .* need it: leave it out",
        lambda paged: scatter(paged, ROWS, scales=torch.ones(10, LAYERS)),
    ),
    "scales of another shape": (
        ValueError,
        r"scales has shape \[10, 2\] and dtype Float, must be \[10, 3\] float32",
        lambda paged: scatter(paged, ROWS.to(torch.float8_e4m3fn), scales=torch.ones(10, 2)),
    ),
    "scales of another dtype": (
        ValueError,
        r"scales has shape \[10, 3\] and dtype Double, must be \[10, 3\] float32",
        lambda paged: scatter(
            paged, ROWS.to(torch.float8_e4m3fn), scales=torch.ones(10, LAYERS).double()
        ),
    ),
    "a slot outside the cache": (
        IndexError,
        r"slot_mapping\[1\] is 24, outside the paged cache's 24 slots \(6 blocks of 4 tokens\): "
        r"pass slots from 0 to 23, or negative ones for padding",
        lambda paged: torch.ops.hscache.gather_slots(paged, torch.tensor([3, 24])),
    ),
    "a slot mapping of floats": (
        ValueError,
        r"slot_mapping has dtype Float, must be int32 or int64",
        lambda paged: torch.ops.hscache.gather_slots(paged, SLOTS.float()),
    ),
    "a slot mapping of two dimensions": (
        ValueError,
        r"slot_mapping has shape \[1, 6\], must be one-dimensional",
        lambda paged: torch.ops.hscache.write_slots_(paged, SLOTS[None], ROWS[:6]),
    ),
    "fewer slots than rows": (
        IndexError,
        r"start 0 and length 10 reach beyond a slot mapping of 6 tokens: pass a slot for every",
        lambda paged: torch.ops.hscache.write_slots_(paged, SLOTS, ROWS),
    ),
}


@pytest.mark.parametrize("case", MORE_REFUSALS)
def test_what_is_refused_is_left_as_it_was(case: str) -> None:
    error, text, call = MORE_REFUSALS[case]
    paged = make_paged(torch.int8).float()
    before = paged.clone()
    with pytest.raises(error, match=text) as caught:
        call(paged)
    assert type(caught.value) is error
    assert torch.equal(paged, before)


def test_padding_reads_as_zeros_and_is_not_written() -> None:
    paged = make_paged(torch.int8).float()
    rows = torch.ops.hscache.gather_slots(paged, SLOTS)
    assert torch.equal(rows[3], paged[5, :, 3])
    assert torch.equal(rows[1], torch.zeros(LAYERS, HIDDEN))
    before = paged.clone()
    torch.ops.hscache.write_slots_(paged, SLOTS, rows + 1)
    changed = (paged != before).any(-1).any(1).nonzero().tolist()
    assert changed == [[0, 0], [1, 0], [4, 1], [5, 3]]


def test_the_error_of_float8_is_that_of_its_three_bits_of_fraction() -> None:
    paged = torch.randn(6, 1, 4, 4096, generator=torch.Generator().manual_seed(0))
    scales = torch.empty(24, 1)
    codes = torch.ops.hscache.gather_paged(
        paged, torch.arange(6), 0, 24, torch.float8_e4m3fn, scales_out=scales
    )
    back = torch.zeros_like(paged)
    torch.ops.hscache.scatter_paged_(back, torch.arange(6), 0, codes, scales=scales)
    normal = paged.abs() > scales.max() * 2**-6  # where the codes have all their bits
    assert ((back - paged).abs() <= paged.abs() * 2**-4)[normal].all()
    assert (back - paged).abs().max() <= paged.abs().max() * 2**-4


# What torch.library.opcheck calls each operator with.
CALLS: dict[str, Callable[[torch.Tensor], tuple[tuple[object, ...], dict[str, object]]]] = {
    "gather_paged": lambda paged: ((paged, IDS, 1, 10), {}),
    "gather_paged nothing": lambda paged: ((paged, IDS.int(), 0, 0), {}),
    "gather_paged bfloat16": lambda paged: ((paged, IDS.int(), 1, 10, torch.bfloat16), {}),
    "gather_paged.scaled": lambda paged: (
        (paged, IDS, 1, 10, torch.float8_e4m3fn),
        {"scales_out": torch.zeros(10, LAYERS)},
    ),
    "scatter_paged_": lambda paged: ((paged, IDS, 1, ROWS), {}),
    "scatter_paged_ float16": lambda paged: ((paged, IDS.int(), 1, ROWS.half()), {}),
    "scatter_paged_ float8": lambda paged: (
        (paged, IDS, 1, ROWS.to(torch.float8_e4m3fn)),
        {"scales": torch.ones(10, LAYERS)},
    ),
    "gather_slots": lambda paged: ((paged, SLOTS), {}),
    "gather_slots.scaled": lambda paged: (
        (paged, SLOTS.int(), torch.float8_e4m3fn),
        {"scales_out": torch.zeros(6, LAYERS)},
    ),
    "write_slots_": lambda paged: ((paged, SLOTS, ROWS[:6]), {}),
    "write_slots_ bfloat16": lambda paged: ((paged, SLOTS.int(), ROWS[:6].bfloat16()), {}),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("layout", ["contiguous", "token-major", "padded"])
def test_opcheck(call: str, layout: str) -> None:
    paged = make_paged(torch.int8).float()
    if layout != "contiguous":
        paged = strided_views()[layout](paged)
    args, kwargs = CALLS[call](paged)
    name, _, overload = call.split()[0].partition(".")
    operator = getattr(getattr(torch.ops.hscache, name), overload or "default")
    # The check of the schema multiplies its arguments, which torch cannot do with float8.
    takes_float8 = any(
        isinstance(arg, torch.Tensor) and arg.dtype == torch.float8_e4m3fn for arg in args
    )
    checks = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(
        operator, args, kwargs, test_utils=checks if takes_float8 else ("test_schema", *checks)
    )


def doubled(paged: torch.Tensor, ids: torch.Tensor, start: int, length: int) -> torch.Tensor:
    return gather(paged * 2, ids, start, length) + 1


def through_all(paged: torch.Tensor, ids: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Reads and writes in turn: an order that a compiler must keep."""
    rows = hidden_cache.ops.gather_paged(paged, ids, 1, 6, torch.bfloat16) * 2
    hidden_cache.ops.write_slots_(paged, slots, rows)
    again = hidden_cache.ops.gather_slots(paged, slots) + 1
    hidden_cache.ops.scatter_paged_(paged, ids, 2, again)
    scales = torch.empty(6, LAYERS)
    codes = hidden_cache.ops.gather_paged(paged, ids, 0, 6, torch.float8_e4m3fn, scales_out=scales)
    return codes.float() * scales[..., None] + paged.sum()


def test_compiles_into_one_graph() -> None:
    compiled = torch.compile(doubled, fullgraph=True, backend="inductor")
    paged = make_paged(torch.int8).float()
    assert torch.equal(compiled(paged, IDS, 1, 10), doubled(paged, IDS, 1, 10))


def test_reads_and_writes_keep_their_order_when_compiled() -> None:
    compiled = torch.compile(through_all, fullgraph=True, backend="inductor")
    ours, expected = (make_paged(torch.int8).float() for _ in range(2))
    assert torch.equal(compiled(ours, IDS, SLOTS), through_all(expected, IDS, SLOTS))
    assert torch.equal(ours, expected)


def test_one_graph_serves_every_length() -> None:
    graphs = 0

    def counting(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Callable[..., object]:
        nonlocal graphs
        graphs += 1
        return graph.forward

    compiled = torch.compile(doubled, fullgraph=True, dynamic=True, backend=counting)
    paged = make_paged(torch.int8).float()
    for start, length in ((1, 10), (2, 7), (3, 9), (5, 2)):
        assert torch.equal(compiled(paged, IDS, start, length), doubled(paged, IDS, start, length))
    assert graphs == 1


@pytest.mark.parametrize("call", CALLS)
def test_the_wrapper_is_the_operator(call: str) -> None:
    name = call.split()[0].partition(".")[0]
    ours, theirs = (make_paged(torch.int8).float() for _ in range(2))
    args, kwargs = CALLS[call](ours)
    found = getattr(hidden_cache.ops, name)(*args, **kwargs)
    args, kwargs = CALLS[call](theirs)
    expected = getattr(torch.ops.hscache, name)(*args, **kwargs)
    assert found is expected is None or torch.equal(as_bytes(found), as_bytes(expected))
    assert torch.equal(ours, theirs)


def test_tensors_on_different_devices_are_refused_before_they_run() -> None:
    paged = make_paged().to("meta")
    with pytest.raises(ValueError, match="a tensor is on cpu, must be on paged's meta"):
        torch.ops.hscache.scatter_paged_(paged, IDS, 1, ROWS)
    with pytest.raises(ValueError, match="the ids are on meta, must be on cpu or the CPU"):
        gather(make_paged(), IDS.to("meta"), 0, 4)
