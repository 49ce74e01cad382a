"""What the transfer engine must do to any random case, on any device."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any

import torch

from hidden_cache import HiddenCacheConfig, HiddenStateStore, _native
from hidden_cache._native import Element
from tests.paged_cases import FLOAT8, FLOATS, Case, draw_case, draw_elements, same, to_float8

# How rows of GPU memory reach the pool. On the host there is only one way: all three are it.
WAYS: dict[str, dict[str, Any]] = {
    "kernel": {"dma_span_bytes": 1 << 62},
    "copy engine": {"dma_span_bytes": 1},
    "zero copy": {"zero_copy": True},
}
SOON_S = 60.0  # a wait that takes this long has failed

_ELEMENTS = {
    torch.float32: Element.FLOAT32,
    torch.float16: Element.FLOAT16,
    torch.bfloat16: Element.BFLOAT16,
    FLOAT8: Element.FLOAT8,
}


class Place:
    """An engine beside a pool that its device copies to without a detour."""

    def __init__(
        self,
        device: str,
        *,
        slot_bytes: int = 8192,
        num_slots: int = 512,
        huge_pages: str = "off",
        wait_for_registration: bool = True,
        **options: Any,
    ) -> None:
        self.device = torch.device(device)
        on_gpu = self.device.type == "cuda"
        # Less than many requests, and room for four rows of the largest case.
        options = {"staging_bytes": 64 << 10} | options
        self.engine = _native.TransferEngine(
            cuda_device=(self.device.index or 0) if on_gpu else None, **options
        )
        self.arena = _native.Arena(slot_bytes * num_slots, huge_pages=huge_pages)
        self.pool = _native.SlotPool(self.arena, slot_bytes)
        self.registration = self.engine.register_arena(self.arena)
        if wait_for_registration:
            self.registration.wait()

    def stream(self) -> int:
        """The raw handle of the stream that torch enqueues on."""
        if self.device.type != "cuda":
            return 0
        return torch.cuda.current_stream(self.device).cuda_stream

    def gather(
        self,
        paged: torch.Tensor,
        block_ids: Iterable[int],
        pieces: list[_native.Piece],
        stream: int | None = None,
        **elements: Any,
    ) -> _native.Ticket:
        """Submits; `stream` wrote the rows, torch's current one where it is not given."""
        ticket = self.engine.gather(
            view_of(paged),
            list(block_ids),
            pieces,
            self.pool,
            self.stream() if stream is None else stream,
            **elements,
        )
        assert ticket is not None
        return ticket

    def read(
        self,
        slots: list[list[int]],
        length: int,
        hidden: int,
        dtype: torch.dtype,
        *,
        stored: Element = Element.ANY,
        wanted: Element = Element.ANY,
        stored_row_bytes: int | None = None,
    ) -> torch.Tensor:
        """Rows out of the pool, `[length, layers, hidden]`; `slots` by layer."""
        out = torch.zeros((length, len(slots), hidden), dtype=torch.int8).to(dtype)
        row_bytes = hidden * dtype.itemsize
        for layer, run in enumerate(slots):
            self.pool.read_rows(
                run,
                stored_row_bytes or row_bytes,
                0,
                length,
                out.data_ptr() + layer * row_bytes,
                len(slots) * row_bytes,
                stored,
                wanted,
            )
        return out

    def close(self) -> None:
        self.engine.close()


def view_of(paged: torch.Tensor) -> _native.PagedView:
    """A paged cache `[num_blocks, layers, block_size, hidden]` as the engine sees it."""
    item = paged.element_size()
    blocks, layers, block_size, hidden = paged.shape
    return _native.PagedView(
        paged.data_ptr(),
        (blocks, layers, block_size),
        hidden * item,
        (paged.stride(0) * item, paged.stride(1) * item, paged.stride(2) * item),
    )


def rows_view(rows: torch.Tensor) -> _native.PagedView:
    """Rows `[tokens, layers, hidden]` as paged memory of one block."""
    return view_of(rows.transpose(0, 1)[None])


def rows_in_slot(slot_bytes: int, row_bytes: int, stored: Element) -> int:
    """As many as fit, with their scales where they are float8."""
    if stored != Element.FLOAT8:
        return slot_bytes // row_bytes
    rows = slot_bytes // (row_bytes + 4)
    scales_at = -(-rows * row_bytes // 4) * 4
    return rows if scales_at + 4 * rows <= slot_bytes else rows - 1


def plan(
    pool: _native.SlotPool,
    layers: int,
    start: int,
    length: int,
    row_bytes: int,
    stored: Element = Element.ANY,
) -> tuple[list[_native.Piece], list[list[int]]]:
    """Pieces that fill slots with a range of tokens of all layers, and the slots by layer."""
    rows = rows_in_slot(pool.slot_bytes, row_bytes, stored)
    firsts = range(0, length, rows)
    taken = pool.allocate(layers * len(firsts))
    assert taken is not None, "the pool of this test is too small"
    slots = [taken[i * len(firsts) : (i + 1) * len(firsts)] for i in range(layers)]
    # By chunk, as a store submits them: neighbouring layers travel together.
    pieces = [
        (layer, start + first, min(rows, length - first), slots[layer][i], 0)
        for i, first in enumerate(firsts)
        for layer in range(layers)
    ]
    return pieces, slots


def ended(ticket: _native.Ticket) -> None:
    """Waits for a transfer that must arrive."""
    assert ticket.wait(SOON_S), "the transfer has not ended"
    assert ticket.error is None, ticket.error


def check_gather(place: Place, rng: random.Random) -> None:
    """Rows in the pool equal plain indexing and plain casts; non-finite ones are counted."""
    case = draw_case(rng, device=str(place.device))
    paged = case.paged
    _, layers, _, hidden = paged.shape
    counts = paged.dtype in FLOATS and rng.random() < 0.5
    converts = case.rows_dtype != paged.dtype
    given: dict[str, Any] = {}
    stored = Element.ANY
    if converts or counts:
        stored = _ELEMENTS[case.rows_dtype]
        given = {"source_element": _ELEMENTS[paged.dtype], "stored": stored}
    row_bytes = hidden * case.rows_dtype.itemsize
    pieces, slots = plan(place.pool, layers, case.start, case.length, row_bytes, stored)
    ticket = place.gather(paged, case.block_ids.tolist(), pieces, count_non_finite=counts, **given)
    ended(ticket)
    expected = case.gathered(slots=False)
    if counts:
        not_finite = (~expected.float().isfinite()).any(-1).sum()
        assert ticket.non_finite_rows == int(not_finite), case.text()
    if stored == Element.FLOAT8:
        codes, scales = to_float8(expected)
        expected = codes.float() * scales[..., None]
        found = place.read(
            slots,
            case.length,
            hidden,
            torch.float32,
            stored=stored,
            wanted=Element.FLOAT32,
            stored_row_bytes=row_bytes,
        )
    else:
        expected = expected.to(case.rows_dtype)
        found = place.read(slots, case.length, hidden, case.rows_dtype)
    place.pool.free([slot for run in slots for slot in run])
    assert same(found, expected), case.text()


def check_scatter(place: Place, rng: random.Random) -> None:
    """Rows brought to the pool by copy_rows come back into the places of their tokens."""
    case = draw_case(rng, device=str(place.device), repeats=False)
    paged = case.paged
    _, layers, _, hidden = paged.shape
    converts = case.rows_dtype != paged.dtype
    # Float8 rows have scales once they are in a slot: they are made on the way there.
    source_dtype = torch.float32 if converts and case.rows_dtype == FLOAT8 else case.rows_dtype
    rows = draw_elements(rng, (case.length, layers, hidden), source_dtype)
    row_bytes = hidden * case.rows_dtype.itemsize
    stored = _ELEMENTS[case.rows_dtype] if converts else Element.ANY
    pieces, slots = plan(place.pool, layers, 0, case.length, row_bytes, stored)
    on_device = rows.to(place.device)
    there: dict[str, Any] = {}
    back: dict[str, Any] = {}
    if converts:
        there = {"rows_element": _ELEMENTS[source_dtype], "stored": stored}
        back = {"target_element": _ELEMENTS[paged.dtype], "stored": stored}
    ticket = place.engine.copy_rows(
        rows_view(on_device), pieces, place.pool, place.stream(), **there
    )
    assert ticket is not None
    ended(ticket)
    if source_dtype == case.rows_dtype:
        values = rows
        assert same(place.read(slots, case.length, hidden, case.rows_dtype), rows), case.text()
    else:
        codes, scales = to_float8(rows)
        values = codes.float() * scales[..., None]
    expected = case.written(values.to(paged.dtype), slots=False)
    ticket = place.engine.scatter(
        view_of(paged),
        case.block_ids.tolist(),
        [
            (layer, case.start + first, count, slot, row)
            for layer, first, count, slot, row in pieces
        ],
        place.pool,
        place.stream(),
        **back,
    )
    assert ticket is not None
    ended(ticket)
    place.pool.free([slot for run in slots for slot in run])
    assert same(paged, expected), case.text()


def long_request(
    place: Place, tokens: int = 4096, hidden: int = 64, layers: int = 2, seed: int = 0
) -> tuple[Case, list[_native.Piece], list[list[int]]]:
    """A request of many steps: bfloat16, blocks of 16 in any order."""
    block_size = 16
    blocks = -(-tokens // block_size)
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(blocks, layers, block_size, hidden, generator=generator)
    paged = values.to(torch.bfloat16).to(place.device)
    ids = torch.randperm(blocks, generator=generator)
    case = Case(paged, ids, 0, tokens, torch.tensor([], dtype=torch.int64), torch.bfloat16)
    pieces, slots = plan(place.pool, layers, 0, tokens, hidden * 2)
    return case, pieces, slots


def check_arrives(place: Place, seed: int = 0) -> None:
    """A request of many steps arrives whole."""
    case, pieces, slots = long_request(place, seed=seed)
    ended(place.gather(case.paged, case.block_ids.tolist(), pieces))
    found = place.read(slots, case.length, case.paged.size(3), torch.bfloat16)
    place.pool.free([slot for run in slots for slot in run])
    assert same(found, case.gathered(slots=False))


def check_rows_may_be_reused(place: Place, rounds: int = 20) -> None:
    """Once a ticket has ended nothing reads the rows any more: they are overwritten at once."""
    for seed in range(rounds):
        case, pieces, slots = long_request(place, tokens=1024, seed=seed)
        expected = case.gathered(slots=False)
        ended(place.gather(case.paged, case.block_ids.tolist(), pieces))
        case.paged.fill_(-1.0)
        found = place.read(slots, case.length, case.paged.size(3), torch.bfloat16)
        place.pool.free([slot for run in slots for slot in run])
        assert same(found, expected)


def check_cancel(device: str, **options: Any) -> None:
    """A transfer cancelled half-way fails once what was on its way has run; others go on."""
    place = Place(device, threaded=False, **options)
    case, pieces, _ = long_request(place)
    ticket = place.gather(case.paged, case.block_ids.tolist(), pieces)
    assert place.engine.poll()  # some of it is on its way, the ring has no room for all
    ticket.cancel()
    place.engine.drain()
    assert ticket.ended
    assert ticket.error is not None
    assert "cancelled" in ticket.error
    small, pieces, slots = long_request(place, tokens=64, seed=1)
    again = place.gather(small.paged, small.block_ids.tolist(), pieces)
    place.engine.drain()
    ended(again)
    found = place.read(slots, small.length, small.paged.size(3), torch.bfloat16)
    assert same(found, small.gathered(slots=False))
    place.close()


def check_close_with_work_in_flight(
    device: str, before: Callable[[], object] = lambda: None, **options: Any
) -> None:
    """Closing ends every ticket: arrived whole, or failed with the reason. `before` delays them."""
    place = Place(device, **options)
    requests = [long_request(place, tokens=1024, seed=seed) for seed in range(6)]
    before()
    tickets = [
        place.gather(case.paged, case.block_ids.tolist(), pieces) for case, pieces, _ in requests
    ]
    place.close()
    for ticket, (case, _, slots) in zip(tickets, requests, strict=True):
        assert ticket.ended
        if ticket.error is not None:
            assert "closed" in ticket.error
            continue
        found = place.read(slots, case.length, case.paged.size(3), torch.bfloat16)
        assert same(found, case.gathered(slots=False))
    assert place.engine.pending == 0


def check_store(device: str) -> None:
    """A store takes chunks from a cache on the device and gives them back."""
    chunk, layers, hidden = 16, [2, 15, 30], 128
    config = HiddenCacheConfig(pool_bytes=8 << 20, chunk_size=chunk, staging_bytes=1 << 20)
    store = HiddenStateStore(config)
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(40, len(layers), chunk, hidden, generator=generator).to(torch.bfloat16)
    paged = values.to(device)
    stream = torch.cuda.current_stream(paged.device).cuda_stream if paged.is_cuda else None
    blocks = torch.randperm(40, generator=generator)[:20].tolist()
    tokens = list(range(20 * chunk + 3))  # the last three are no whole chunk
    ticket = store.store_paged(tokens, paged, [*blocks, 0], layer_idxs=layers, stream=stream)
    assert ticket is not None
    ended(ticket)
    assert store.coverage(tokens, layers) == 20 * chunk
    found = store.retrieve_layers(tokens, [15, 30])
    assert found is not None
    for layer in (15, 30):
        expected = values[blocks, layers.index(layer)].flatten(0, 1)
        assert same(found[layer], expected)
    assert store.store_paged(tokens, paged, [*blocks, 0], layer_idxs=layers, stream=stream) is None
    if paged.is_cuda:
        stats = store.stats()
        assert stats.pin_refusal == ""
        assert stats.pinning or stats.pinned_bytes > 0
    store.close()
