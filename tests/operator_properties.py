"""What the operators must do to any random case, on any device."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from tests.paged_cases import FLOAT8, Case, draw_case, draw_elements, same, to_float8


def rows_of(ops: Any, case: Case, scales: torch.Tensor | None, *, slots: bool) -> torch.Tensor:
    """What the operator gathers for a case."""
    dtype = case.rows_dtype if case.rows_dtype != case.paged.dtype else None
    given = {} if scales is None else {"scales_out": scales}
    if slots:
        found = ops.gather_slots(case.paged, case.slot_mapping, dtype, **given)
    else:
        found = ops.gather_paged(
            case.paged, case.block_ids, case.start, case.length, dtype, **given
        )
    assert isinstance(found, torch.Tensor)
    return found


def check_gather(ops: Any, rng: random.Random, device: str = "cpu") -> None:
    """Gathers by block table and by slots equal plain indexing and plain casts."""
    case = draw_case(rng, device=device)
    for slots in (False, True):
        expected = case.gathered(slots=slots)
        shape = expected.shape[:2]
        if case.rows_dtype == FLOAT8 and case.paged.dtype != FLOAT8:
            scales = (
                torch.empty(shape[::-1], device=device).t()
                if slots
                else torch.empty(shape, device=device)
            )
            found = rows_of(ops, case, scales, slots=slots)
            expected, expected_scales = to_float8(expected)
            padding = case.places(slots=slots)[0] < 0
            expected_scales[padding] = 0.0
            assert torch.equal(scales.cpu(), expected_scales), case.text()
        else:
            found = rows_of(ops, case, None, slots=slots)
            expected = expected.to(case.rows_dtype)
        assert found.is_contiguous()
        assert found.device == case.paged.device
        assert same(found, expected), case.text()


def check_scatter(ops: Any, rng: random.Random, device: str = "cpu") -> None:
    """Writes by block table and by slots change what they should and nothing else."""
    case = draw_case(rng, device=device, repeats=False)
    _, layers, _, hidden = case.paged.shape
    for slots in (False, True):
        length = len(case.slot_mapping) if slots else case.length
        rows = draw_elements(rng, (length, layers, hidden), case.rows_dtype)
        scales = None
        if case.rows_dtype == FLOAT8 and case.paged.dtype != FLOAT8:
            scales = torch.rand(length, layers) * 3
            stored = (rows.float() * scales[..., None]).to(case.paged.dtype)
            scales = scales.to(device)
        else:
            stored = rows.to(case.paged.dtype)
        expected = case.written(stored, slots=slots)
        rows = rows.to(device)
        if slots:
            ops.write_slots_(case.paged, case.slot_mapping, rows, scales=scales)
        else:
            ops.scatter_paged_(case.paged, case.block_ids, case.start, rows, scales=scales)
        assert same(case.paged, expected), case.text()


def check_refused_ids(ops: Any, rng: random.Random, device: str) -> None:
    """An id outside the cache fills its rows, touches nothing, and is raised by the next call."""
    case = draw_case(rng, device=device, repeats=False)
    if case.length == 0:
        return
    blocks, _, block_size, _ = case.paged.shape
    block_ids = case.block_ids.clone()
    bad = rng.choice([-1, blocks, blocks + 3, 2**31 - 1])
    position = rng.randint(case.start, case.start + case.length - 1) // block_size
    block_ids[position] = bad
    before = case.paged.cpu().clone()
    tokens = torch.arange(case.start, case.start + case.length)
    hit = tokens // block_size == position
    found = ops.gather_paged(case.paged, block_ids, case.start, case.length)
    expected = case.gathered(slots=False)
    expected.view(torch.uint8)[hit] = 0xFF
    if device != "cpu":
        torch.cuda.synchronize()
    with pytest.raises(IndexError, match=rf"met id {bad} .* outside the {blocks} "):
        ops.gather_slots(case.paged, case.slot_mapping)
    assert same(found, expected), case.text()
    rows = torch.zeros_like(found)
    ops.scatter_paged_(case.paged, block_ids, case.start, rows)
    expected = case.written(rows, slots=False)
    hit_block = case.block_ids.cpu()[position]
    expected[hit_block] = before[hit_block]
    if device != "cpu":
        torch.cuda.synchronize()
    with pytest.raises(IndexError, match=rf"met id {bad} "):
        ops.gather_paged(case.paged, case.block_ids, 0, 0)
    assert same(case.paged, expected), case.text()
