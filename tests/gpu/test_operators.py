"""The operators on a GPU against plain torch, on any stream and device."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import hidden_cache.ops  # noqa: F401 (loads the operators)
from tests.gpu import DEVICE, SEEDS, busy, needs_gpu, side_stream
from tests.operator_properties import check_gather, check_refused_ids, check_scatter

pytestmark = needs_gpu


class WithIdsOnTheHost:
    """The operators, given a copy of their ids in host memory."""

    def __getattr__(self, name: str) -> Any:
        operator = getattr(torch.ops.hscache, name)

        def call(paged: torch.Tensor, ids: torch.Tensor, *rest: Any, **named: Any) -> Any:
            return operator(paged, ids.cpu(), *rest, **named)

        return call


OPERATORS = {"ids on the GPU": torch.ops.hscache, "ids on the host": WithIdsOnTheHost()}


@pytest.mark.parametrize("ids", OPERATORS)
def test_gathers(ids: str) -> None:
    for seed in range(SEEDS):
        check_gather(OPERATORS[ids], random.Random(seed), DEVICE)


@pytest.mark.parametrize("ids", OPERATORS)
def test_scatters(ids: str) -> None:
    for seed in range(SEEDS):
        check_scatter(OPERATORS[ids], random.Random(seed), DEVICE)


def test_ids_refused_by_kernels() -> None:
    for seed in range(SEEDS // 4):
        check_refused_ids(torch.ops.hscache, random.Random(seed), DEVICE)


def test_host_ids_are_refused_before_anything_runs() -> None:
    paged = torch.zeros(4, 1, 2, 8, device=DEVICE)
    with pytest.raises(IndexError, match=r"block_ids\[1\] is 4, outside the paged cache's 4"):
        torch.ops.hscache.scatter_paged_(
            paged, torch.tensor([0, 4]), 0, torch.ones(4, 1, 8, device=DEVICE)
        )
    assert not paged.any()


def test_a_long_request_is_gathered_whole() -> None:
    # More rows than the largest grid has threads for.
    paged = torch.randint(-(1 << 15), 1 << 15, (600, 4, 64, 1024), dtype=torch.int16, device=DEVICE)
    ids = torch.randperm(600, device=DEVICE)
    tokens = torch.arange(17, 600 * 64 - 5, device=DEVICE)
    rows = torch.ops.hscache.gather_paged(paged, ids, 17, len(tokens))
    assert torch.equal(rows, paged[ids[tokens // 64], :, tokens % 64])


def test_runs_on_torchs_current_stream() -> None:
    values = torch.randn(8, 2, 4, 64, device=DEVICE)
    paged = torch.zeros_like(values)
    ids = torch.tensor([5, 0, 3], device=DEVICE)
    expected = values[ids].transpose(1, 2).flatten(0, 1)
    torch.ops.hscache.gather_paged(paged, ids, 0, 12)  # loads the kernel, which waits for all
    side = side_stream()
    torch.cuda.synchronize(DEVICE)
    with torch.cuda.stream(side):
        busy(20)
        paged.copy_(values)
        rows = torch.ops.hscache.gather_paged(paged, ids, 0, 12)
        torch.ops.hscache.scatter_paged_(paged, ids, 0, rows + 1)
        again = torch.ops.hscache.gather_paged(paged, ids, 0, 12)
    side.synchronize()
    assert torch.equal(rows, expected)
    assert torch.equal(again, expected + 1)


def test_runs_on_the_device_of_its_tensors() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("there is one GPU, two are needed")
    assert torch.cuda.current_device() == 0
    for seed in range(SEEDS // 10):
        check_gather(torch.ops.hscache, random.Random(seed), "cuda:1")
        check_scatter(torch.ops.hscache, random.Random(seed), "cuda:1")
        check_refused_ids(torch.ops.hscache, random.Random(seed), "cuda:1")
    assert torch.cuda.current_device() == 0


def test_tensors_on_different_devices_are_refused() -> None:
    paged = torch.zeros(4, 1, 2, 8)
    with pytest.raises((ValueError, RuntimeError)):
        torch.ops.hscache.gather_paged(paged, torch.tensor([0], device=DEVICE), 0, 2)
    with pytest.raises((ValueError, RuntimeError)):
        torch.ops.hscache.scatter_paged_(
            paged.to(DEVICE), torch.tensor([0]), 0, torch.zeros(2, 1, 8)
        )
