"""What several test modules share: paged caches that hold known rows."""

from __future__ import annotations

import random
from typing import Literal

import torch

Layout = Literal["block-major", "token-major", "layer-major", "padded"]
LAYOUTS: tuple[Layout, ...] = ("block-major", "token-major", "layer-major", "padded")


def make_rows(
    tokens: int, layers: int, hidden: int, dtype: torch.dtype = torch.int32, *, first: int = 0
) -> torch.Tensor:
    """Rows `[tokens, layers, hidden]` whose elements all differ (for dtypes that can tell)."""
    count = tokens * layers * hidden
    return torch.arange(first, first + count).view(tokens, layers, hidden).to(dtype)


def make_paged(
    rows: torch.Tensor, block_size: int, layout: Layout = "block-major", *, seed: int = 0
) -> tuple[torch.Tensor, list[int]]:
    """A paged cache `[num_blocks, layers, block_size, hidden]` with `rows`, and its block table.

    Blocks lie in random order, with foreign ones between; what is not a row of ours is 77.
    """
    tokens, layers, hidden = rows.shape
    needed = -(-tokens // block_size)
    num_blocks = needed + 3
    block_ids = random.Random(seed).sample(range(num_blocks), needed)
    if layout == "block-major":
        paged = torch.empty(num_blocks, layers, block_size, hidden, dtype=rows.dtype)
    elif layout == "token-major":
        paged = torch.empty(num_blocks, block_size, layers, hidden, dtype=rows.dtype)
        paged = paged.transpose(1, 2)
    elif layout == "layer-major":
        paged = torch.empty(layers, num_blocks, block_size, hidden, dtype=rows.dtype)
        paged = paged.transpose(0, 1)
    else:
        paged = torch.empty(num_blocks, layers + 1, block_size + 1, hidden + 3, dtype=rows.dtype)
        paged = paged[:, 1:, :block_size, 2 : hidden + 2]
    paged.fill_(77)
    for token in range(tokens):
        paged[block_ids[token // block_size], :, token % block_size] = rows[token]
    return paged, block_ids
