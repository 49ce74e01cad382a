"""The operators on random layouts against plain torch: on the CPU, and the kernels on the host."""

from __future__ import annotations

import ctypes
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import hidden_cache.ops  # noqa: F401 (loads the operators)
from tests.operator_properties import check_gather, check_refused_ids, check_scatter

ON_HOST = Path(__file__).parents[2] / "build/tests-plain/csrc/tests/_ops_on_host.so"

# In each, a block table and a slot mapping: 10,000 and 5,000 in `make test`.
CPU_ROUNDS = 25 * int(os.environ.get("HSCACHE_EXAMPLES", "80"))
HOST_ROUNDS = CPU_ROUNDS // 2


@pytest.fixture(scope="module")
def on_host() -> ctypes.CDLL:
    """Loads torch.ops.hscache_on_host: what runs on a GPU, its kernels as plain C++."""
    if not ON_HOST.exists():
        pytest.skip("the C++ tests are not built here: make test-cpp builds _ops_on_host")
    torch.ops.load_library(str(ON_HOST))  # type: ignore[no-untyped-call]
    return ctypes.CDLL(str(ON_HOST))


@pytest.fixture
def capture(on_host: ctypes.CDLL) -> Iterator[None]:
    on_host.hscache_on_host_capture(1)
    yield
    on_host.hscache_on_host_capture(0)


def test_gathers_on_the_cpu() -> None:
    for seed in range(CPU_ROUNDS):
        check_gather(torch.ops.hscache, random.Random(seed))


def test_scatters_on_the_cpu() -> None:
    for seed in range(CPU_ROUNDS):
        check_scatter(torch.ops.hscache, random.Random(seed))


@pytest.mark.usefixtures("on_host")
def test_gathers_by_kernels() -> None:
    for seed in range(HOST_ROUNDS):
        check_gather(torch.ops.hscache_on_host, random.Random(seed))


@pytest.mark.usefixtures("on_host")
def test_scatters_by_kernels() -> None:
    for seed in range(HOST_ROUNDS):
        check_scatter(torch.ops.hscache_on_host, random.Random(seed))


@pytest.mark.usefixtures("on_host")
def test_ids_refused_by_kernels() -> None:
    for seed in range(HOST_ROUNDS // 5):
        check_refused_ids(torch.ops.hscache_on_host, random.Random(seed), "cpu")


@pytest.mark.usefixtures("capture")
def test_nothing_is_raised_while_a_graph_is_captured(on_host: ctypes.CDLL) -> None:
    ops = torch.ops.hscache_on_host
    paged = torch.ones(2, 1, 4, 8)
    ids = torch.tensor([7])
    assert ops.gather_paged(paged, ids, 0, 2).isnan().all()
    assert ops.gather_paged(paged, ids, 0, 2).isnan().all()
    on_host.hscache_on_host_capture(0)
    with pytest.raises(IndexError, match=r"met id 7 .* outside the 2 .* Pass ids from 0 to 1"):
        ops.gather_paged(paged, ids, 0, 0)
    assert ops.gather_paged(paged, torch.tensor([1]), 0, 2).eq(1).all()
