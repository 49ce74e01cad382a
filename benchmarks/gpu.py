"""The CUDA data plane: kernels, GPU memory to pool, what it costs whoever computes beside it.

"Kernels" times the operators by device events, ids on the GPU, beside torch's `index_select`; the
floor is a copy within the device. The bytes of a cast are the mean of those read and written, as
for a copy.

"To the pool" is one request from GPU memory into a registered pool by the transfer engine, from the
call until its ticket has ended. Beside it: `index_select` and a copy to pinned memory. The floor is
the plain copy of the same bytes to pinned memory.

"Span" moves rows whose pieces of contiguous bytes have one size: packed by a kernel, by the copy
engine alone, and by kernels that write to the pool themselves.

"GEMMs" are bfloat16 matrix products of about a millisecond each on the compute stream, while the
engine extracts and while it does not.

"Caller" is the time of one `gather(wait=False)` on the calling thread.

"Pool" is from nothing to the first rows in a pool of 8 GiB, and until all of it is pinned.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from benchmarks.core.bench import Bench
from benchmarks.core.errors import BenchmarkError
from benchmarks.core.measure import Budget, Contender
from benchmarks.core.memory import available_bytes

try:
    import hidden_cache.ops
    from hidden_cache import _native, numa
except (ImportError, OSError) as error:
    raise BenchmarkError(f"hidden_cache cannot be imported ({error}): build it first") from error

KERNEL_TARGET = 0.90
POOL_TARGET = 0.95
GEMM_TARGET = 0.98
CALLER_TARGET_S = 30e-6
USABLE_TARGET_S = 0.05

DTYPE = torch.bfloat16
CHUNK = 256
SPAN_ROW_BYTES = 4096
DEVICE_COPY = "copy within the device"
PINNED_COPY = "plain copy to pinned memory"
# How the engine may move rows.
WAYS: dict[str, dict[str, Any]] = {
    "kernel": {"dma_span_bytes": 1 << 62},
    "copy engine": {"dma_span_bytes": 1},
    "zero copy": {"zero_copy": True},
}

Group = tuple[list[Contender], Budget | None]


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is moved; tests take little."""

    tokens: int = 8192
    layers: int = 4
    hidden: int = 4096
    block_sizes: tuple[int, ...] = (16, 64)
    span_tokens: int = 16_384
    spans: tuple[int, ...] = tuple(SPAN_ROW_BYTES << i for i in range(9))
    gemm: tuple[int, int, int] = (8192, 5120, 8192)
    gemms: int = 100
    calls: int = 1000
    pool_bytes: int = 8 << 30


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


class Clock:
    """Times work on a device: by its events on a GPU, by the clock on the host."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.on_gpu = device.type == "cuda"

    def synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def stream(self) -> int:
        return torch.cuda.current_stream(self.device).cuda_stream if self.on_gpu else 0

    def pinned(self, like: torch.Tensor) -> torch.Tensor:
        """Host memory for as many elements, which a GPU copies to without a detour."""
        return torch.empty(like.numel(), dtype=like.dtype, pin_memory=self.on_gpu)

    def device_seconds(self, work: Callable[[], object], repeat: int) -> float:
        """Seconds of the device for one of `repeat` runs of `work`."""
        if not self.on_gpu:
            start = time.perf_counter()
            for _ in range(repeat):
                work()
            return (time.perf_counter() - start) / repeat
        begin, end = _event(), _event()
        # All is enqueued before the first begins: the caller's own time does not count.
        torch.cuda._sleep(4_000_000)  # type: ignore[no-untyped-call]
        begin.record()
        for _ in range(repeat):
            work()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3 / repeat

    def host_seconds(self, work: Callable[[], object]) -> float:
        """Seconds until `work` has returned, beginning with an idle device."""
        self.synchronize()
        start = time.perf_counter()
        work()
        return time.perf_counter() - start


@dataclass(frozen=True, slots=True)
class Request:
    """A cache of twice as many tokens as one request has, whose blocks are in no order."""

    paged: torch.Tensor
    table: list[int]
    tokens: int

    @property
    def payload_bytes(self) -> int:
        return self.tokens * self.paged.size(1) * self.row_bytes

    @property
    def row_bytes(self) -> int:
        return self.paged.size(3) * self.paged.element_size()

    @property
    def view(self) -> _native.PagedView:
        item = self.paged.element_size()
        blocks, layers, block_size, _ = self.paged.shape
        block, layer, token, _ = (item * stride for stride in self.paged.stride())
        shape = (blocks, layers, block_size)
        return _native.PagedView(
            self.paged.data_ptr(), shape, self.row_bytes, (block, layer, token)
        )

    def ids(self) -> torch.Tensor:
        return torch.tensor(self.table, device=self.paged.device)

    def slots(self) -> torch.Tensor:
        """The slot of every token."""
        block_size = self.paged.size(2)
        tokens = torch.arange(self.tokens, device=self.paged.device)
        return self.ids()[tokens // block_size] * block_size + tokens % block_size

    def by_slot(self) -> torch.Tensor:
        """The cache as `[slots, layers, hidden]`, a view in both orders."""
        return self.paged.transpose(1, 2).flatten(0, 1)

    def pieces(self, tokens: int | None = None) -> list[_native.Piece]:
        """Its rows into slots of `CHUNK` rows, from slot 0 on, chunk by chunk."""
        layers = self.paged.size(1)
        tokens = tokens or self.tokens
        return [
            (layer, first, min(CHUNK, tokens - first), first // CHUNK * layers + layer, 0)
            for first in range(0, tokens, CHUNK)
            for layer in range(layers)
        ]


def make_request(
    device: torch.device, order: str, tokens: int, layers: int, block_size: int, hidden: int
) -> Request:
    used = -(-tokens // block_size)
    blocks = 2 * used
    generator = torch.Generator().manual_seed(0)
    if order == "token-major":
        memory = torch.empty((blocks, block_size, layers, hidden), dtype=DTYPE, device=device)
        paged = memory.permute(0, 2, 1, 3)
    else:
        memory = torch.empty((layers, blocks, block_size, hidden), dtype=DTYPE, device=device)
        paged = memory.permute(1, 0, 2, 3)
    memory.normal_()
    # Every second block, so that no two are neighbours.
    table = (2 * torch.randperm(used, generator=generator)).tolist()
    return Request(paged, table, tokens)


class Pool:
    """An engine and a registered pool with room for one request."""

    def __init__(self, clock: Clock, request: Request, **options: Any) -> None:
        self.clock, self.request = clock, request
        cuda_device = (clock.device.index or 0) if clock.on_gpu else None
        self.engine = _native.TransferEngine(cuda_device=cuda_device, **options)
        slot_bytes = CHUNK * request.row_bytes
        layers = request.paged.size(1)
        num_slots = -(-request.tokens // CHUNK) * layers
        arena = _native.Arena(num_slots * slot_bytes)
        node, _ = numa.node_for("auto", clock.device)
        if node is not None:
            arena.prefer_numa_node(node)
        self.pool = _native.SlotPool(arena, slot_bytes)
        # A pool takes memory as slots are asked for; these are never given back.
        if self.pool.allocate(num_slots) is None:
            raise BenchmarkError("the pool has no room for the request")
        self.registration = self.engine.register_arena(arena)
        self.registration.wait()
        if clock.on_gpu and self.registration.refusal:
            raise BenchmarkError(f"the pool is not pinned: {self.registration.refusal}")
        self._view, self._pieces = request.view, request.pieces()

    def submit(self) -> _native.Ticket:
        ticket = self.engine.gather(
            self._view, self.request.table, self._pieces, self.pool, self.clock.stream()
        )
        assert ticket is not None
        return ticket

    def gather(self) -> None:
        wait_for(self.submit())

    def check(self) -> None:
        """Raises BenchmarkError unless the pool gets the rows that indexing gives."""
        self.gather()
        request = self.request
        layers = request.paged.size(1)
        expected = request.by_slot().index_select(0, request.slots()).cpu()
        found = torch.empty_like(expected)
        chunks = range(-(-request.tokens // CHUNK))
        for layer in range(layers):
            self.pool.read_rows(
                [chunk * layers + layer for chunk in chunks],
                request.row_bytes,
                0,
                request.tokens,
                found.data_ptr() + layer * request.row_bytes,
                layers * request.row_bytes,
            )
        if not torch.equal(found, expected):
            raise BenchmarkError("rows in the pool are not those of the cache")


def wait_for(ticket: _native.Ticket) -> None:
    ticket.wait()
    if ticket.error is not None:
        raise BenchmarkError(f"rows did not arrive: {ticket.error}")


def why_no_gpu() -> str:
    """Why nothing can be measured here; empty where it can."""
    if not torch.cuda.is_available():
        return f"torch.cuda.is_available() is False (torch {torch.__version__})"
    return _native.why_no_cuda()


def run(bench: Bench) -> None:
    if why := why_no_gpu():
        raise BenchmarkError(f"there is no GPU to measure: {why}")
    sizes = Sizes(tokens=1024, spans=Sizes().spans[::4], calls=50) if bench.quick else Sizes()
    for name, make in bench.groups(groups(torch.device("cuda:0"), sizes)):
        contenders, budget = make()
        bench.measure(name, contenders, budget=budget)


def groups(device: torch.device, sizes: Sizes) -> dict[str, Callable[[], Group]]:
    """What makes each group ready, by its name; device memory is taken then."""
    clock = Clock(device)
    layouts = [
        (order, block_size)
        for order in ("token-major", "layer-major")
        for block_size in sizes.block_sizes
    ]
    made: dict[str, Callable[[], Group]] = {}
    for order, block_size in layouts:
        made[f"kernels, {order}, block {block_size}"] = partial(
            _kernels, clock, sizes, order, block_size
        )
    for order, block_size in layouts:
        made[f"to the pool, {order}, block {block_size}"] = partial(
            _to_the_pool, clock, sizes, order, block_size
        )
    made["caller's thread"] = partial(_caller, clock, sizes)
    made[f"pool of {sizes.pool_bytes / 2**30:g} GiB"] = partial(_pool, clock, sizes)
    made["GEMMs"] = partial(_gemms, clock, sizes, "beside extraction", GEMM_TARGET)
    # Zero copy comes last: should it lose the context, all else has been measured.
    for span in sizes.spans:
        made[span_group(span)] = partial(_span, clock, sizes, span)
    made["GEMMs, zero copy"] = partial(
        _gemms, clock, sizes, "beside extraction by zero copy", None, zero_copy=True
    )
    return made


def span_group(span: int) -> str:
    return f"span {span >> 10} KiB"


def _kernels(clock: Clock, sizes: Sizes, order: str, block_size: int) -> Group:
    request = make_request(
        clock.device, order, sizes.tokens, sizes.layers, block_size, sizes.hidden
    )
    paged, ids, slots, tokens = request.paged, request.ids(), request.slots(), request.tokens
    by_slot = request.by_slot()
    rows = by_slot.index_select(0, slots)
    target = torch.empty_like(rows)
    scales = torch.empty((tokens, sizes.layers), device=clock.device)
    gather = hidden_cache.ops.gather_paged
    float8 = torch.float8_e4m3fn
    if not torch.equal(gather(paged, ids, 0, tokens), rows):
        raise BenchmarkError(f"gather_paged gives other rows than index_select ({order})")
    payload = request.payload_bytes
    ways: dict[str, tuple[Callable[[], object], int]] = {
        "gather_paged": (lambda: gather(paged, ids, 0, tokens), payload),
        "gather_paged to float16": (
            lambda: gather(paged, ids, 0, tokens, torch.float16),
            payload,
        ),
        "gather_paged to float8 with scales": (
            lambda: gather(paged, ids, 0, tokens, float8, scales_out=scales),
            payload * 3 // 4,
        ),
        "scatter_paged_": (
            lambda: hidden_cache.ops.scatter_paged_(paged, ids, 0, rows),
            payload,
        ),
        "torch index_select": (lambda: by_slot.index_select(0, slots), payload),
        DEVICE_COPY: (lambda: target.copy_(rows), payload),
    }
    contenders = [
        Contender(
            name,
            partial(clock.device_seconds, work, 5),
            bytes=moved,
            floor=None if name == DEVICE_COPY else DEVICE_COPY,
            target_ratio=KERNEL_TARGET if name == "gather_paged" else None,
        )
        for name, (work, moved) in ways.items()
    ]
    return contenders, None


def _plain_copy(clock: Clock, source: torch.Tensor) -> Contender:
    source = source.flatten()
    pinned = clock.pinned(source)

    def copy() -> None:
        pinned.copy_(source, non_blocking=True)
        clock.synchronize()

    return Contender(PINNED_COPY, partial(clock.host_seconds, copy), bytes=source.nbytes)


def _to_the_pool(clock: Clock, sizes: Sizes, order: str, block_size: int) -> Group:
    request = make_request(
        clock.device, order, sizes.tokens, sizes.layers, block_size, sizes.hidden
    )
    pool = Pool(clock, request)
    pool.check()
    by_slot, slots = request.by_slot(), request.slots()
    rows = by_slot.index_select(0, slots)
    pinned = clock.pinned(rows).view_as(rows)

    def by_torch() -> None:
        pinned.copy_(by_slot.index_select(0, slots), non_blocking=True)
        clock.synchronize()

    payload = request.payload_bytes
    contenders = [
        Contender(
            "transfer engine",
            partial(clock.host_seconds, pool.gather),
            bytes=payload,
            floor=PINNED_COPY,
            target_ratio=POOL_TARGET,
        ),
        Contender(
            "index_select and copy_",
            partial(clock.host_seconds, by_torch),
            bytes=payload,
            floor=PINNED_COPY,
        ),
        _plain_copy(clock, rows),
    ]
    return contenders, None


def _span(clock: Clock, sizes: Sizes, span: int) -> Group:
    # One layer, so that the contiguous piece is a block's rows of a layer on both sides.
    request = make_request(
        clock.device,
        "layer-major",
        sizes.span_tokens,
        1,
        span // SPAN_ROW_BYTES,
        SPAN_ROW_BYTES // DTYPE.itemsize,
    )
    contenders = []
    for name, options in WAYS.items():
        pool = Pool(clock, request, **options)
        pool.check()
        contenders.append(
            Contender(
                name,
                partial(clock.host_seconds, pool.gather),
                bytes=request.payload_bytes,
                floor=PINNED_COPY,
            )
        )
    contenders.append(_plain_copy(clock, request.by_slot()[: request.tokens]))
    return contenders, Budget(seconds=1.0, min_rounds=5, max_rounds=30)


def _gemms(clock: Clock, sizes: Sizes, name: str, target: float | None, **options: Any) -> Group:
    rows, inner, columns = sizes.gemm
    left = torch.randn((rows, inner), dtype=DTYPE, device=clock.device)
    right = torch.randn((inner, columns), dtype=DTYPE, device=clock.device)
    out = torch.empty((rows, columns), dtype=DTYPE, device=clock.device)
    block_size = sizes.block_sizes[0]
    request = make_request(
        clock.device, "token-major", sizes.tokens, sizes.layers, block_size, sizes.hidden
    )

    def products() -> None:
        for _ in range(sizes.gemms):
            torch.mm(left, right, out=out)

    def alone() -> float:
        clock.synchronize()
        return clock.device_seconds(products, 1)

    alone()
    pool = Pool(clock, request, max_pending=1 << 16, **options)
    pool.check()
    transfers = 2 + math.ceil(1.5 * alone() / clock.host_seconds(pool.gather))

    def beside() -> float:
        nonlocal transfers
        for _ in range(6):
            clock.synchronize()
            tickets = [pool.submit() for _ in range(transfers)]
            seconds = clock.device_seconds(products, 1)
            # In host memory a transfer may take less time than it takes to submit it.
            lasted = not (clock.on_gpu and tickets[-1].ended)
            for ticket in tickets:
                ticket.cancel()
            pool.engine.drain()
            if lasted:
                return seconds
            transfers *= 2
        raise BenchmarkError(f"{transfers // 2} transfers ended before the GEMMs did")

    floor = "alone"
    contenders = [
        Contender(name, beside, floor=floor, target_ratio=target),
        Contender(floor, alone),
    ]
    return contenders, None


def _caller(clock: Clock, sizes: Sizes) -> Group:
    request = make_request(
        clock.device, "token-major", sizes.tokens, sizes.layers, sizes.block_sizes[0], sizes.hidden
    )
    pool = Pool(clock, request)
    view, stream = request.view, clock.stream()

    def call(pieces: list[_native.Piece], table: list[int]) -> float:
        start = time.perf_counter()
        ticket = pool.engine.gather(view, table, pieces, pool.pool, stream, False)
        seconds = time.perf_counter() - start
        if ticket is None:
            raise BenchmarkError("the engine refuses a transfer, though none is pending")
        wait_for(ticket)
        return seconds

    contenders = []
    for tokens in sorted({min(CHUNK, sizes.tokens), sizes.tokens}):
        table = request.table[: -(-tokens // sizes.block_sizes[0])]
        contenders.append(
            Contender(
                f"gather(wait=False), {tokens} tokens",
                partial(call, request.pieces(tokens), table),
                target_seconds=CALLER_TARGET_S,
            )
        )
    return contenders, Budget(seconds=5.0, min_rounds=min(200, sizes.calls), max_rounds=sizes.calls)


def _pool(clock: Clock, sizes: Sizes) -> Group:
    available = available_bytes()
    # Beside it the machine's own eighth, where touching stops.
    need = sizes.pool_bytes + sizes.pool_bytes // 4
    if available is not None and available < need:
        raise BenchmarkError(
            f"{available / 1e9:.1f} GB of memory are available, {need / 1e9:.1f} are needed"
        )
    request = make_request(clock.device, "token-major", CHUNK, 1, 16, sizes.hidden)
    view, pieces = request.view, [(0, 0, CHUNK, 0, 0)]
    slot_bytes = CHUNK * request.row_bytes
    cuda_device = (clock.device.index or 0) if clock.on_gpu else None

    def start(until_pinned: bool) -> float:
        clock.synchronize()
        begin = time.perf_counter()
        arena = _native.Arena(sizes.pool_bytes)
        engine = _native.TransferEngine(cuda_device=cuda_device)
        pool = _native.SlotPool(arena, slot_bytes)
        arena.touch_in_background(1.0)
        registration = engine.register_arena(arena)
        slots = pool.allocate(1)
        ticket = engine.gather(view, request.table, pieces, pool, clock.stream())
        assert slots == [0]
        assert ticket is not None
        wait_for(ticket)
        if until_pinned:
            registration.wait()
            if clock.on_gpu and registration.refusal:
                raise BenchmarkError(f"the pool is not pinned: {registration.refusal}")
        seconds = time.perf_counter() - begin
        engine.close()
        return seconds

    contenders = [
        Contender("first rows in it", partial(start, False), target_seconds=USABLE_TARGET_S),
        Contender("all of it pinned", partial(start, True), bytes=sizes.pool_bytes),
    ]
    return contenders, Budget(seconds=0.0, min_rounds=2, max_rounds=2)
