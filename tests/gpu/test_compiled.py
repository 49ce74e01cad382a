"""What torch asks of an operator, on a GPU: opcheck, and one graph when compiled."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import hidden_cache.ops
from tests.gpu import DEVICE, needs_gpu
from tests.paged_cases import FLOAT8

pytestmark = needs_gpu

BLOCKS, LAYERS, BLOCK_SIZE, HIDDEN = 6, 3, 4, 64

Arguments = tuple[tuple[object, ...], dict[str, object]]


def make_paged(layout: str) -> torch.Tensor:
    """Small whole numbers, which all dtypes hold exactly."""
    generator = torch.Generator().manual_seed(0)
    shape = (BLOCKS, LAYERS, BLOCK_SIZE, HIDDEN)
    paged = torch.randint(-8, 9, shape, generator=generator).float().to(DEVICE)
    if layout == "token-major":
        return paged.transpose(1, 2).contiguous().transpose(1, 2)
    return paged


def ids() -> torch.Tensor:
    return torch.tensor([4, 1, 5], device=DEVICE)


def slots() -> torch.Tensor:
    return torch.tensor([17, -1, 4, 23, -7, 0], device=DEVICE)


def rows() -> torch.Tensor:
    return torch.ones(6, LAYERS, HIDDEN, device=DEVICE)


CALLS: dict[str, Callable[[torch.Tensor], Arguments]] = {
    "gather_paged": lambda paged: ((paged, ids(), 1, 10), {}),
    "gather_paged host ids": lambda paged: ((paged, ids().cpu(), 1, 10), {}),
    "gather_paged bfloat16": lambda paged: ((paged, ids().int(), 1, 10, torch.bfloat16), {}),
    "gather_paged.scaled": lambda paged: (
        (paged, ids(), 1, 10, FLOAT8),
        {"scales_out": torch.zeros(10, LAYERS, device=DEVICE)},
    ),
    "scatter_paged_": lambda paged: ((paged, ids(), 1, rows()), {}),
    "scatter_paged_ float8": lambda paged: (
        (paged, ids(), 1, rows().to(FLOAT8)),
        {"scales": torch.ones(6, LAYERS, device=DEVICE)},
    ),
    "gather_slots": lambda paged: ((paged, slots()), {}),
    "write_slots_": lambda paged: ((paged, slots(), rows()), {}),
    "write_slots_ float16": lambda paged: ((paged, slots().int(), rows().half()), {}),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("layout", ["contiguous", "token-major"])
def test_opcheck(call: str, layout: str) -> None:
    args, named = CALLS[call](make_paged(layout))
    name, _, overload = call.split()[0].partition(".")
    operator = getattr(getattr(torch.ops.hscache, name), overload or "default")
    checks = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    # The check of the schema multiplies its arguments, which torch cannot do with float8.
    if not any(isinstance(arg, torch.Tensor) and arg.dtype == FLOAT8 for arg in args):
        checks.append("test_schema")
    torch.library.opcheck(operator, args, named, test_utils=checks)


def through_all(paged: torch.Tensor, table: torch.Tensor, mapping: torch.Tensor) -> torch.Tensor:
    """Reads and writes in turn: an order that a compiler must keep."""
    read = hidden_cache.ops.gather_paged(paged, table, 1, 6, torch.bfloat16) * 2
    hidden_cache.ops.write_slots_(paged, mapping, read)
    again = hidden_cache.ops.gather_slots(paged, mapping) + 1
    hidden_cache.ops.scatter_paged_(paged, table, 2, again)
    scales = torch.empty(6, LAYERS, device=paged.device)
    codes = hidden_cache.ops.gather_paged(paged, table, 0, 6, FLOAT8, scales_out=scales)
    # Sums of whole numbers are exact in any order.
    return codes.float() * scales[..., None] + paged.sum()


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_reads_and_writes_keep_their_order_in_one_graph(backend: str) -> None:
    compiled = torch.compile(through_all, fullgraph=True, backend=backend)
    ours, expected = make_paged("contiguous"), make_paged("contiguous")
    found = compiled(ours, ids(), slots())
    assert torch.allclose(found, through_all(expected, ids(), slots()))
    assert torch.equal(ours, expected)
