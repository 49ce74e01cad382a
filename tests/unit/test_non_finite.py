"""Rows with an infinity or a NaN are found, and no others, whatever their numbers are made of."""

from __future__ import annotations

import pytest
import torch

from hidden_cache.non_finite import count_non_finite

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e5m2,
    torch.float8_e4m3fn,
]
of_every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def is_finite(rows: torch.Tensor) -> torch.Tensor:
    return rows.to(torch.float64).isfinite()


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype.itemsize < 4], ids=str)
def test_every_pattern_of_bits_is_told_right(dtype: torch.dtype) -> None:
    kind = torch.uint8 if dtype.itemsize == 1 else torch.int16
    count = 1 << (8 * dtype.itemsize)
    patterns = torch.arange(count).to(kind).view(dtype).view(count, 1, 1)
    expected = ~is_finite(patterns).view(count)
    found = torch.tensor(
        [count_non_finite(pattern)[0] for pattern in torch.split(patterns, 1)]
    ).bool()
    assert torch.equal(found, expected)
    assert count_non_finite(patterns) == (int(expected.sum()), int(expected.nonzero()[0]))


@of_every_dtype
def test_a_row_counts_once_and_the_first_token_is_named(dtype: torch.dtype) -> None:
    rows = torch.zeros(9, 3, 5).to(dtype)
    assert count_non_finite(rows) == (0, 0)
    nan = torch.tensor(float("nan")).to(dtype)
    for token, layer, place in [(8, 0, 0), (4, 2, 4), (4, 2, 3), (4, 0, 1)]:
        rows[token, layer, place] = nan
    assert count_non_finite(rows) == (3, 4)
    rows[0] = nan
    assert count_non_finite(rows) == (6, 0)


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan"), -float("nan")])
@pytest.mark.parametrize("dtype", DTYPES[:5], ids=str)
def test_one_number_among_many_is_found(dtype: torch.dtype, value: float) -> None:
    rows = torch.randn(50, 2, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert count_non_finite(rows) == (0, 0)
    rows[37, 1, 7] = value
    assert count_non_finite(rows) == (1, 37)


@pytest.mark.parametrize("dtype", DTYPES[:4], ids=str)
def test_the_largest_numbers_are_finite_though_their_sum_is_not(dtype: torch.dtype) -> None:
    rows = torch.full((64, 2, 64), torch.finfo(dtype).max, dtype=dtype)
    rows[::2] *= -1
    assert count_non_finite(rows) == (0, 0)
    rows.abs_()
    assert not rows.sum().isfinite()
    assert count_non_finite(rows) == (0, 0)


@pytest.mark.parametrize("shape", [(0, 2, 3), (3, 0, 3), (3, 2, 0)])
def test_no_numbers_are_finite(shape: tuple[int, int, int]) -> None:
    assert count_non_finite(torch.empty(shape)) == (0, 0)
