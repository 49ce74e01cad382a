"""Operators captured into CUDA graphs, and transfers beside a capture."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import hidden_cache.ops  # noqa: F401 (loads the operators)
from tests.engine_properties import WAYS, Place, check_arrives, ended, long_request
from tests.gpu import DEVICE, needs_gpu, side_stream
from tests.paged_cases import FLOAT8, same, to_float8

pytestmark = needs_gpu

BLOCKS, LAYERS, BLOCK_SIZE, HIDDEN = 9, 3, 4, 64
TABLES = [[4, 1, 5], [0, 8, 2], [7, 7, 3]]
LENGTH = 10

ops = torch.ops.hscache


def make_paged() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(BLOCKS, LAYERS, BLOCK_SIZE, HIDDEN, generator=generator)
    return values.to(torch.bfloat16).to(DEVICE)


def expected_rows(paged: torch.Tensor, table: list[int]) -> torch.Tensor:
    """Tokens 1 to 11 of a request."""
    return paged.cpu()[table].transpose(1, 2).flatten(0, 1)[1 : 1 + LENGTH]


def slots_of(table: list[int]) -> list[int]:
    return [table[i // BLOCK_SIZE] * BLOCK_SIZE + i % BLOCK_SIZE for i in range(1, 1 + LENGTH)]


def captured(work: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """A graph of `work`, which ran once before: kernels are loaded, workspaces are there."""
    side = side_stream()
    side.wait_stream(torch.cuda.current_stream(DEVICE))
    with torch.cuda.stream(side):
        work()
    torch.cuda.current_stream(DEVICE).wait_stream(side)
    torch.cuda.synchronize(DEVICE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


def test_replayed_gathers_follow_the_ids() -> None:
    paged = make_paged()
    ids = torch.tensor(TABLES[0], device=DEVICE)
    slots = torch.tensor(slots_of(TABLES[0]), dtype=torch.int32, device=DEVICE)
    scales = torch.zeros(LENGTH, LAYERS, device=DEVICE)
    found: dict[str, torch.Tensor] = {}

    def work() -> None:
        found["rows"] = ops.gather_paged(paged, ids, 1, LENGTH)
        found["half"] = ops.gather_slots(paged, slots, torch.float16)
        found["codes"] = ops.gather_paged(paged, ids, 1, LENGTH, FLOAT8, scales_out=scales)

    graph = captured(work)
    for table in [*TABLES, TABLES[0]]:
        ids.copy_(torch.tensor(table))
        slots.copy_(torch.tensor(slots_of(table)))
        graph.replay()
        torch.cuda.synchronize(DEVICE)
        expected = expected_rows(paged, table)
        codes, expected_scales = to_float8(expected)
        assert same(found["rows"], expected)
        assert same(found["half"], expected.half())
        assert same(found["codes"], codes)
        assert torch.equal(scales.cpu(), expected_scales)


def test_replayed_writes_follow_the_ids_and_the_rows() -> None:
    paged = torch.zeros(BLOCKS, LAYERS, BLOCK_SIZE, HIDDEN, device=DEVICE)
    rows = torch.zeros(LENGTH, LAYERS, HIDDEN, device=DEVICE)
    ids = torch.tensor(TABLES[0], device=DEVICE)
    slots = torch.tensor([-1] * LENGTH, device=DEVICE)

    def work() -> None:
        ops.scatter_paged_(paged, ids, 1, rows)
        ops.write_slots_(paged, slots, rows * 2)

    graph = captured(work)
    for round_, (first, second) in enumerate([(TABLES[0], TABLES[1]), (TABLES[1], [3, 6, 7])]):
        paged.zero_()
        rows.fill_(round_ + 1.0)
        ids.copy_(torch.tensor(first))
        slots.copy_(torch.tensor(slots_of(second)))
        graph.replay()
        torch.cuda.synchronize(DEVICE)
        expected = torch.zeros(BLOCKS * BLOCK_SIZE)
        expected[slots_of(first)] = round_ + 1.0
        expected[slots_of(second)] = 2 * (round_ + 1.0)
        found = paged.cpu().permute(0, 2, 1, 3).flatten(0, 1)
        assert torch.equal(found, expected[:, None, None].expand_as(found))


def test_a_bad_id_in_a_replayed_graph_is_raised_by_the_next_operator() -> None:
    paged = make_paged()
    ids = torch.tensor(TABLES[0], device=DEVICE)
    found: dict[str, torch.Tensor] = {}

    def work() -> None:
        found["rows"] = ops.gather_paged(paged, ids, 0, 3 * BLOCK_SIZE)

    graph = captured(work)
    ids.copy_(torch.tensor([4, BLOCKS, 5]))
    for _ in range(3):  # a second replay finds the word taken
        graph.replay()
    torch.cuda.synchronize(DEVICE)
    rows = found["rows"].cpu()
    assert rows[BLOCK_SIZE : 2 * BLOCK_SIZE].isnan().all()
    assert torch.equal(rows[:BLOCK_SIZE], paged.cpu()[4].transpose(0, 1))
    with pytest.raises(IndexError, match=rf"met id {BLOCKS} .* outside the {BLOCKS} "):
        ops.gather_paged(paged, ids, 0, 0)
    ids.copy_(torch.tensor(TABLES[0]))
    graph.replay()
    torch.cuda.synchronize(DEVICE)
    assert not found["rows"].isnan().any()
    ops.gather_paged(paged, ids, 0, 0)  # nothing is left to raise


def test_nothing_is_raised_while_a_graph_is_captured() -> None:
    paged = make_paged()
    bad = torch.tensor([BLOCKS], device=DEVICE)
    good = torch.tensor([1], device=DEVICE)

    def work() -> None:
        ops.gather_paged(paged, good, 0, 2)

    captured(work)
    ops.gather_paged(paged, bad, 0, 2)
    torch.cuda.synchronize(DEVICE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    with pytest.raises(IndexError, match=f"met id {BLOCKS} "):
        work()


@pytest.mark.parametrize("way", ["kernel", "copy engine"])
def test_transfers_run_beside_a_capture(way: str) -> None:
    place = Place(DEVICE, **WAYS[way])
    check_arrives(place)
    case, pieces, slots = long_request(place, seed=1)
    paged = make_paged()
    ids = torch.tensor(TABLES[0], device=DEVICE)
    found: dict[str, torch.Tensor] = {}

    def work() -> None:
        found["rows"] = ops.gather_paged(paged, ids, 1, LENGTH)

    captured(work)
    producer = side_stream()
    torch.cuda.synchronize(DEVICE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
        # By the engine's own thread and streams, on behalf of a stream that is not captured.
        ticket = place.gather(case.paged, case.block_ids.tolist(), pieces, producer.cuda_stream)
        ended(ticket)
    graph.replay()
    torch.cuda.synchronize(DEVICE)
    assert same(found["rows"], expected_rows(paged, TABLES[0]))
    rows = place.read(slots, case.length, case.paged.size(3), torch.bfloat16)
    assert same(rows, case.gathered(slots=False))
    place.close()


def test_a_captured_stream_is_refused_as_producer_and_the_capture_goes_on() -> None:
    place = Place(DEVICE)
    case, pieces, _ = long_request(place, tokens=64)
    paged = make_paged()
    ids = torch.tensor(TABLES[0], device=DEVICE)
    found: dict[str, torch.Tensor] = {}

    def work() -> None:
        found["rows"] = ops.gather_paged(paged, ids, 1, LENGTH)

    captured(work)
    table = case.block_ids.tolist()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(ValueError, match="being captured into a CUDA graph"):
            place.gather(case.paged, table, pieces)
        work()
    graph.replay()
    torch.cuda.synchronize(DEVICE)
    assert same(found["rows"], expected_rows(paged, TABLES[0]))
    check_arrives(place)
    place.close()
