"""Transfers of random layouts against plain torch: casts, scales, counts, both directions."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

from hidden_cache import _native
from hidden_cache._native import Element
from tests.paged_cases import (
    FLOAT8,
    FLOATS,
    Case,
    draw_case,
    draw_elements,
    same,
    to_float8,
)

ROUNDS = 3000
ELEMENTS = {
    torch.float32: Element.FLOAT32,
    torch.float16: Element.FLOAT16,
    torch.bfloat16: Element.BFLOAT16,
    FLOAT8: Element.FLOAT8,
}
ARENA_BYTES = 1 << 22


@dataclass(frozen=True, slots=True)
class Stored:
    """Where a case's rows lie in a pool: slots of `rows_in_slot` rows, layer by layer."""

    pool: _native.SlotPool
    dtype: torch.dtype
    hidden: int
    length: int
    rows_in_slot: int
    slots: list[list[int]]

    @property
    def row_bytes(self) -> int:
        return self.hidden * self.dtype.itemsize

    def pieces(self, start: int) -> list[_native.Piece]:
        """Chunk by chunk, each chunk's second half apart: it begins inside its slot."""
        found = []
        half = max(1, self.rows_in_slot // 2)
        for first in range(0, self.length, self.rows_in_slot):
            count = min(self.rows_in_slot, self.length - first)
            for row, rows in ((0, min(half, count)), (half, count - half)):
                for layer, slots in enumerate(self.slots):
                    if rows > 0:
                        slot = slots[first // self.rows_in_slot]
                        found.append((layer, start + first + row, rows, slot, row))
        return found

    def read(self, wanted: torch.dtype) -> torch.Tensor:
        """The rows `[length, layers, hidden]` as `wanted`."""
        out = torch.zeros(self.length, len(self.slots), self.hidden, dtype=torch.int8).to(wanted)
        known = self.dtype in ELEMENTS and wanted != self.dtype
        for layer, slots in enumerate(self.slots):
            self.pool.read_rows(
                slots,
                self.row_bytes,
                0,
                self.length,
                out[:, layer].data_ptr(),
                out.stride(0) * out.element_size(),
                ELEMENTS[self.dtype] if known else Element.ANY,
                ELEMENTS[wanted] if known else Element.ANY,
            )
        return out


def slots_for(rng: random.Random, case: Case) -> Stored:
    """A pool of its own for a case's rows, in the dtype that they are stored in."""
    layers, hidden = case.paged.shape[1], case.paged.shape[3]
    scale_bytes = 4 if case.rows_dtype == FLOAT8 and case.paged.dtype != FLOAT8 else 0
    row_bytes = hidden * case.rows_dtype.itemsize
    rows_in_slot = rng.randint(1, 9)
    slot_bytes = (rows_in_slot * row_bytes + 3) // 4 * 4 + rows_in_slot * scale_bytes
    pool = _native.SlotPool(_native.Arena(ARENA_BYTES), slot_bytes)
    if not scale_bytes:
        rows_in_slot = slot_bytes // row_bytes
    chunks = -(-case.length // rows_in_slot)
    slots = [pool.allocate(chunks) for _ in range(layers)]
    assert all(found is not None for found in slots)
    return Stored(
        pool,
        case.rows_dtype,
        hidden,
        case.length,
        rows_in_slot,
        [found for found in slots if found is not None],
    )


def view_of(paged: torch.Tensor) -> _native.PagedView:
    item = paged.element_size()
    blocks, layers, tokens, hidden = paged.shape
    block, layer, token, _ = (item * stride for stride in paged.stride())
    return _native.PagedView(
        paged.data_ptr(), (blocks, layers, tokens), hidden * item, (block, layer, token)
    )


def elements_of(case: Case) -> tuple[Element, Element]:
    """Of the cache and of the rows; unknown where both are the same."""
    if case.paged.dtype == case.rows_dtype or case.paged.dtype not in FLOATS:
        return Element.ANY, Element.ANY
    return ELEMENTS[case.paged.dtype], ELEMENTS[case.rows_dtype]


@pytest.fixture(scope="module")
def engine() -> Iterator[_native.TransferEngine]:
    engine = _native.TransferEngine(staging_bytes=1 << 14)
    yield engine
    engine.close()


def finish(ticket: _native.Ticket | None) -> _native.Ticket:
    assert ticket is not None
    ticket.wait()
    assert ticket.error is None
    return ticket


def test_gathers_convert_and_count(engine: _native.TransferEngine) -> None:
    counted = 0
    for seed in range(ROUNDS):
        rng = random.Random(seed)
        case = draw_case(rng)
        stored = slots_for(rng, case)
        source, kept = elements_of(case)
        counts = source != Element.ANY and rng.random() < 0.5
        ticket = finish(
            engine.gather(
                view_of(case.paged),
                case.block_ids.tolist(),
                stored.pieces(case.start),
                stored.pool,
                source_element=source,
                stored=kept,
                count_non_finite=counts,
            )
        )
        rows = case.gathered(slots=False)
        if case.rows_dtype == FLOAT8 and case.paged.dtype != FLOAT8:
            codes, scales = to_float8(rows)
            for wanted in FLOATS:
                expected = (codes.float() * scales[..., None]).to(wanted)
                assert same(stored.read(wanted), expected), case.text()
        else:
            assert same(stored.read(case.rows_dtype), rows.to(case.rows_dtype)), case.text()
        bad = int((~rows.float().isfinite()).any(-1).sum()) if counts else 0
        assert ticket.non_finite_rows == bad, case.text()
        counted += bad
    assert counted > 0


def test_scatters_bring_back_what_was_gathered(engine: _native.TransferEngine) -> None:
    for seed in range(ROUNDS // 3):
        rng = random.Random(seed)
        case = draw_case(rng, repeats=False)
        stored = slots_for(rng, case)
        elements = elements_of(case)
        pieces = stored.pieces(case.start)
        ids = case.block_ids.tolist()
        view = view_of(case.paged)
        finish(
            engine.gather(
                view, ids, pieces, stored.pool, source_element=elements[0], stored=elements[1]
            )
        )
        converted = elements[0] != Element.ANY
        rows = stored.read(case.paged.dtype) if converted else case.gathered(slots=False)
        zero = torch.zeros((), dtype=torch.int8).to(case.paged.dtype)
        last = -(-(case.start + case.length) // case.paged.shape[2])
        for block in ids[:last]:
            case.paged[block] = zero
        expected = case.written(rows, slots=False)
        finish(
            engine.scatter(
                view, ids, pieces, stored.pool, target_element=elements[0], stored=elements[1]
            )
        )
        assert same(case.paged, expected), case.text()


def test_rows_in_token_order_are_copied(engine: _native.TransferEngine) -> None:
    for seed in range(ROUNDS // 3):
        rng = random.Random(seed)
        case = draw_case(rng)
        stored = slots_for(rng, case)
        layers, hidden = case.paged.shape[1], case.paged.shape[3]
        rows = draw_elements(rng, (case.length, layers, hidden), case.paged.dtype)
        view = view_of(rows.transpose(0, 1)[None])
        source, kept = elements_of(case)
        finish(
            engine.copy_rows(view, stored.pieces(0), stored.pool, rows_element=source, stored=kept)
        )
        if case.rows_dtype == FLOAT8 and case.paged.dtype != FLOAT8:
            codes, scales = to_float8(rows)
            expected = codes.float() * scales[..., None]
            assert same(stored.read(torch.float32), expected), case.text()
        else:
            assert same(stored.read(case.rows_dtype), rows.to(case.rows_dtype)), case.text()


def test_rows_in_token_order_are_one_block(engine: _native.TransferEngine) -> None:
    pool = _native.SlotPool(_native.Arena(1 << 16), 64)
    view = _native.PagedView(0, (2, 1, 4), 16, (64, 64, 16))
    with pytest.raises(ValueError, match=r"are a view of 1 block, not of 2: pass shape \(1, "):
        engine.copy_rows(view, [(0, 0, 4, 0, 0)], pool)


REFUSED: dict[str, tuple[dict[str, object], str]] = {
    "one side unknown": ({"source_element": Element.FLOAT16}, "elements of one side are not known"),
    "a count of unknown elements": ({"count_non_finite": True}, "to count what is not finite"),
    "half an element": (
        {"source_element": Element.FLOAT32, "stored": Element.FLOAT16},
        "a row of 18 bytes is no whole number of elements of 4 bytes",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_conversions_that_make_no_sense_are_refused(
    engine: _native.TransferEngine, case: str
) -> None:
    options, text = REFUSED[case]
    pool = _native.SlotPool(_native.Arena(1 << 16), 180)
    rows = torch.zeros(1, 1, 4, 9, dtype=torch.float16)
    with pytest.raises(ValueError, match=text):
        engine.gather(view_of(rows), [0], [(0, 0, 4, 0, 0)], pool, **options)  # type: ignore[arg-type]
    assert engine.pending == 0
