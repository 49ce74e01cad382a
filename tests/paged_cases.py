"""Random paged caches and requests in them, with what plain torch makes of them.

Without hypothesis, so that a machine that has only torch and pytest draws the same cases.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

DTYPES = [
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]
FLOATS = [torch.float32, torch.float16, torch.bfloat16]
FLOAT8 = torch.float8_e4m3fn
MOST_FLOAT8 = 448.0
LEAST_SCALE = 1.17549435e-38


@dataclass(frozen=True, slots=True)
class Case:
    """One request: a block table and a range, or a slot for every token."""

    paged: torch.Tensor
    block_ids: torch.Tensor
    start: int
    length: int
    slot_mapping: torch.Tensor
    rows_dtype: torch.dtype

    def text(self) -> str:
        """What it is, without its elements."""
        paged = self.paged
        return (
            f"paged {list(paged.shape)} {paged.dtype}, strides {paged.stride()}; block_ids "
            f"{self.block_ids.tolist()} {self.block_ids.dtype}, start {self.start}, length "
            f"{self.length}; slots {self.slot_mapping.tolist()}; rows {self.rows_dtype}"
        )

    def places(self, *, slots: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Block and place in the block of every token; block -1 for padding. On the CPU."""
        block_size = self.paged.shape[2]
        if slots:
            mapping = self.slot_mapping.cpu().long()
            return torch.where(mapping < 0, -1, mapping // block_size), mapping % block_size
        tokens = torch.arange(self.start, self.start + self.length)
        return self.block_ids.cpu().long()[tokens // block_size], tokens % block_size

    def gathered(self, *, slots: bool) -> torch.Tensor:
        """The rows `[n, layers, hidden]` in the cache's dtype; zeros for padding."""
        blocks, places = self.places(slots=slots)
        kept = (blocks >= 0).nonzero()[:, 0]
        shape = (len(blocks), self.paged.shape[1], self.paged.shape[3])
        rows = torch.zeros(shape, dtype=torch.int8).to(self.paged.dtype)
        as_bits(rows)[kept] = as_bits(self.paged.cpu())[blocks[kept], :, places[kept]]
        return rows

    def written(self, rows: torch.Tensor, *, slots: bool) -> torch.Tensor:
        """The cache with `rows`, of its dtype, in the places of the tokens. On the CPU."""
        blocks, places = self.places(slots=slots)
        kept = (blocks >= 0).nonzero()[:, 0]
        paged = self.paged.cpu().clone()
        as_bits(paged)[blocks[kept], :, places[kept]] = as_bits(rows.cpu())[kept]
        return paged


def as_bits(rows: torch.Tensor) -> torch.Tensor:
    """The same elements as integers: some dtypes cannot be indexed."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return rows.view(integers[rows.element_size()])


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are equal to the bit, but for the bits of NaNs."""
    a, b = a.cpu(), b.cpu()
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    equal = as_bits(a) == as_bits(b)
    if a.dtype.is_floating_point:
        equal |= a.float().isnan() & b.float().isnan()
    return bool(equal.all())


def to_float8(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows as float8 and their scales `[n, layers]`, as `hidden_cache.ops` defines them."""
    values = rows.cpu().float()
    finite = torch.where(values.isfinite(), values.abs(), 0.0)
    scales = (finite.amax(-1) / MOST_FLOAT8).clamp_min(LEAST_SCALE)
    codes = (values / scales[..., None]).to(FLOAT8)
    as_bits(codes)[~values.isfinite()] = 0x7F  # torch makes NaN or 448 of an infinity
    return codes, scales


def draw_elements(rng: random.Random, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Any bits at all, or numbers as rows hold them."""
    generator = torch.Generator().manual_seed(rng.getrandbits(32))
    count = int(torch.Size(shape).numel())
    if dtype.is_floating_point and rng.random() < 0.5:
        scale = 2.0 ** rng.randint(-8, 6)
        return (torch.randn(count, generator=generator) * scale).to(dtype).view(shape)
    size = (count * dtype.itemsize,)
    return (
        torch.randint(0, 256, size, dtype=torch.uint8, generator=generator).view(dtype).view(shape)
    )


def draw_paged(rng: random.Random, dtype: torch.dtype, device: str) -> torch.Tensor:
    """A cache in some order and padding of its axes, at some offset in its memory."""
    most_hidden = rng.choice([9, 40, 300])
    blocks, layers, block_size, hidden = (rng.randint(1, most) for most in (8, 4, 6, most_hidden))
    if rng.random() < 0.5:
        hidden = -(-hidden // 8) * 8  # what real models have
    sizes = [blocks, layers, block_size]
    strides = [0, 0, 0]
    extent = hidden
    step = rng.choice([1, 8])
    for axis in rng.sample(range(3), 3):
        strides[axis] = extent + step * rng.choice([0, 0, 0, 1, 2])
        extent = strides[axis] * sizes[axis]
    offset = step * rng.choice([0, 0, 1, 3])
    memory = draw_elements(rng, (offset + extent,), dtype).to(device)
    return memory.as_strided([*sizes, hidden], [*strides, 1], offset)


def draw_case(rng: random.Random, *, device: str = "cpu", repeats: bool = True) -> Case:
    """A case whose ids may repeat, or, for what writes, do not."""
    converts = rng.random() < 0.6
    dtype = rng.choice(FLOATS if converts else DTYPES)
    paged = draw_paged(rng, dtype, device)
    blocks, _, block_size, _ = paged.shape
    if repeats:
        # Runs of neighbours between jumps, as an allocator leaves them.
        ids = [
            (first + i) % blocks
            for first, count in (
                (rng.randrange(blocks), rng.randint(1, 4)) for _ in range(rng.randint(0, 4))
            )
            for i in range(count)
        ]
        slots = [rng.randrange(blocks * block_size) for _ in range(rng.randint(0, 20))]
    else:
        ids = rng.sample(range(blocks), rng.randint(0, blocks))
        slots = rng.sample(range(blocks * block_size), rng.randint(0, blocks * block_size))
    slots = [-rng.randint(1, 9) if rng.random() < 0.1 else slot for slot in slots]
    tokens = len(ids) * block_size
    start = rng.choice([0, rng.randint(0, tokens), max(tokens - 1, 0)])  # one-token tails too
    length = rng.choice([0, tokens - start, rng.randint(0, tokens - start)])
    ids += [rng.randint(-3, 2**30) for _ in range(rng.choice([0, 0, 2]))]  # a longer table
    id_dtype = rng.choice([torch.int32, torch.int64])

    def ids_on_device(values: list[int]) -> torch.Tensor:
        found = torch.tensor(values, dtype=id_dtype)
        if rng.random() < 0.2:  # a column of a batch
            found = torch.stack([found, torch.full_like(found, 99)], dim=1)[:, 0]
        return found.to(device) if found.is_contiguous() else found.to(device)[:]

    rows_dtype = rng.choice([*FLOATS, FLOAT8]) if converts else dtype
    return Case(paged, ids_on_device(ids), start, length, ids_on_device(slots), rows_dtype)
