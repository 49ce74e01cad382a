"""Gather a request's rows out of the paged cache, beside torch indexing and a plain copy.

torch.ops.hscache.gather_paged packs the rows of a request, [length, layers, hidden], out of a
strided paged cache on the host. Beside it run the two ways to say the same in plain torch, with
the slot of every token worked out beforehand (which spares them work that gather_paged does), and
a plain copy of as many bytes, by one thread and by all.

Results go to recycled memory: what is freed is kept for the next repetition. With malloc's
defaults each repetition would meet fresh pages, and every contender would mostly measure page
faults.

Groups: token-major caches (a token's layers lie side by side) and layer-major ones (a layer's
blocks lie side by side), by block size, hidden size, length and order of the block table. Before
anything is timed the results are compared, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import torch

from benchmarks.core.bench import Bench
from benchmarks.core.errors import BenchmarkError
from benchmarks.core.floors import host_copies
from benchmarks.core.measure import Contender
from benchmarks.core.memory import recycle_freed_memory

OURS = "gather_paged"
LAYERS = 4
DTYPE = torch.bfloat16
# Of a plain copy on all threads, where a block's rows are one run of bytes on both sides.
TARGET = 0.85

Gather = Callable[[torch.Tensor, torch.Tensor, int, int], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Layout:
    """One group: a request of `length` tokens in a cache of twice as many."""

    order: str
    block_size: int
    hidden: int
    length: int
    table: str

    @property
    def name(self) -> str:
        return (
            f"{self.order}, block {self.block_size}, hidden {self.hidden}, "
            f"{self.length} tokens, {self.table}"
        )

    @property
    def used_blocks(self) -> int:
        return -(-self.length // self.block_size)

    @property
    def num_blocks(self) -> int:
        return 2 * self.used_blocks

    @property
    def payload_bytes(self) -> int:
        return self.length * LAYERS * self.hidden * DTYPE.itemsize

    @property
    def cache_elements(self) -> int:
        return self.num_blocks * self.block_size * LAYERS * self.hidden

    def paged(self, storage: torch.Tensor) -> torch.Tensor:
        """The cache as a view `[num_blocks, layers, block_size, hidden]` of flat storage."""
        elements = storage[: self.cache_elements]
        if self.order == "token-major":
            shape = (self.num_blocks, self.block_size, LAYERS, self.hidden)
            return elements.view(shape).permute(0, 2, 1, 3)
        shape = (LAYERS, self.num_blocks, self.block_size, self.hidden)
        return elements.view(shape).permute(1, 0, 2, 3)

    def block_ids(self, seed: int) -> torch.Tensor:
        """The block table, int64: the first blocks in order, or blocks from anywhere."""
        if self.table == "contiguous":
            return torch.arange(self.used_blocks)
        generator = torch.Generator().manual_seed(seed)
        return torch.randperm(self.num_blocks, generator=generator)[: self.used_blocks]


def layouts(quick: bool) -> list[Layout]:
    orders, tables = ("token-major", "layer-major"), ("contiguous", "shuffled")
    if quick:
        return [Layout(order, 16, 576, 1000, table) for order, table in product(orders, tables)]
    grid = product(orders, (16, 128), (576, 4096), (1000, 8000), tables)
    return [Layout(*values) for values in grid]


def run(bench: Bench) -> None:
    gather = _gather_paged()
    groups = bench.groups({layout.name: layout for layout in layouts(bench.quick)})
    cache_elements = max(layout.cache_elements for _, layout in groups)
    result_bytes = max(layout.payload_bytes for _, layout in groups)
    bench.touch(cache_elements * DTYPE.itemsize + 3 * result_bytes)
    torch.set_num_threads(bench.threads)
    bench.parameters |= {
        "layers": LAYERS,
        "dtype": str(DTYPE).removeprefix("torch."),
        "recycled_results": recycle_freed_memory(),
    }
    storage = _random_bits(cache_elements, bench.seed)
    for name, layout in groups:
        # The cache's first bytes: as warm or cold as the rows that the others read.
        floors = host_copies(storage[: layout.payload_bytes // DTYPE.itemsize])
        contenders = _contenders(layout, storage, bench.seed, gather, floors[-1].name)
        bench.measure(name, [*contenders, *floors])


def _contenders(
    layout: Layout, storage: torch.Tensor, seed: int, gather: Gather, floor: str
) -> list[Contender]:
    paged = layout.paged(storage)
    block_ids = layout.block_ids(seed)
    tokens = torch.arange(layout.length)
    blocks = block_ids[tokens // layout.block_size]
    offsets = tokens % layout.block_size
    slots = blocks * layout.block_size + offsets
    rows = paged.transpose(1, 2).flatten(0, 1)  # [slots, layers, hidden], a view in both orders
    ways: dict[str, Callable[[], torch.Tensor]] = {
        OURS: lambda: gather(paged, block_ids, 0, layout.length),
        "torch indexing": lambda: paged[blocks, :, offsets],
        "torch index_select": lambda: rows.index_select(0, slots),
    }
    expected = paged[blocks, :, offsets]
    for name, way in ways.items():
        if not _same_bits(way(), expected):
            raise BenchmarkError(f"{name} gives other rows than torch indexing ({layout.name})")
    return [
        Contender(
            name,
            way,
            bytes=layout.payload_bytes,
            floor=floor,
            target_ratio=TARGET if name == OURS and layout.order == "token-major" else None,
        )
        for name, way in ways.items()
    ]


def _random_bits(elements: int, seed: int) -> torch.Tensor:
    """Storage in which no row equals another: random bits, repeated with an odd period."""
    generator = torch.Generator().manual_seed(seed)
    period = torch.randint(-(1 << 15), 1 << 15, ((1 << 20) + 7,), generator=generator)
    bits = torch.empty(elements, dtype=torch.int16)
    for start in range(0, elements, len(period)):
        part = bits[start : start + len(period)]
        part.copy_(period[: len(part)])
    return bits.view(DTYPE)


def _same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equality that takes NaNs for what their bits say."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    return torch.equal(left.view(torch.int16), right.view(torch.int16))


def _gather_paged() -> Gather:
    try:
        from hidden_cache.ops import gather_paged
    except (ImportError, OSError) as error:
        raise BenchmarkError(
            f"hidden_cache.ops cannot be imported ({error}): build the package first, see README.md"
        ) from error
    return gather_paged
