"""The transfer engine between GPU memory and a registered pool."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from tests import engine_properties as properties
from tests.engine_properties import WAYS, Place, ended, long_request
from tests.gpu import DEVICE, SEEDS, busy, needs_gpu, side_stream
from tests.paged_cases import same

pytestmark = needs_gpu


def test_rows_reach_memory_that_is_not_registered() -> None:
    place = Place(DEVICE)
    del place.registration
    properties.check_arrives(place)
    place.close()


def test_rows_arrive_while_the_pool_is_being_registered() -> None:
    # Several pieces of registration, more than one transfer for each.
    place = Place(DEVICE, slot_bytes=1 << 20, num_slots=3 << 10, wait_for_registration=False)
    for seed in range(5):
        properties.check_arrives(place, seed)
    place.registration.wait()
    assert place.registration.refusal == ""
    assert place.registration.bytes == place.arena.bytes
    properties.check_arrives(place)
    place.close()


def test_a_pool_that_asks_for_huge_pages_is_registered() -> None:
    place = Place(DEVICE, slot_bytes=1 << 20, num_slots=64, huge_pages="advise")
    assert place.registration.refusal == ""
    assert place.registration.bytes == place.arena.bytes
    properties.check_arrives(place)
    place.close()


def test_a_store_gives_back_what_it_took() -> None:
    properties.check_store(DEVICE)


@pytest.fixture(scope="module", params=WAYS)
def way(request: pytest.FixtureRequest) -> str:
    """One way after the other, so that one which loses the context hides nothing of those before:
    zero copy, of which the driver promises least, is the last of all."""
    return str(request.param)


@pytest.fixture
def place(way: str) -> Iterator[Place]:
    place = Place(DEVICE, **WAYS[way])
    yield place
    place.close()


def test_all_of_a_pool_is_registered(place: Place) -> None:
    assert place.registration.refusal == ""
    assert place.registration.bytes == place.pool.num_slots * place.pool.slot_bytes
    assert not place.registration.at_work


def test_gathers(place: Place) -> None:
    for seed in range(SEEDS // 2):
        properties.check_gather(place, random.Random(seed))


def test_copies_of_rows_and_scatters(place: Place) -> None:
    for seed in range(SEEDS // 2):
        properties.check_scatter(place, random.Random(seed))


def test_long_requests_arrive(place: Place) -> None:
    properties.check_arrives(place)


def test_rows_may_be_reused_once_a_ticket_has_ended(place: Place) -> None:
    properties.check_rows_may_be_reused(place)


def test_a_gather_waits_for_its_producer(place: Place) -> None:
    properties.check_arrives(place)  # kernels are loaded, which may wait for all streams
    case, pieces, slots = long_request(place)
    expected = case.gathered(slots=False)
    values = case.paged.clone()
    case.paged.zero_()
    side = side_stream()
    torch.cuda.synchronize(DEVICE)
    with torch.cuda.stream(side):
        busy(50)
        case.paged.copy_(values)
    ticket = place.gather(case.paged, case.block_ids.tolist(), pieces, side.cuda_stream)
    ended(ticket)
    found = place.read(slots, case.length, case.paged.size(3), torch.bfloat16)
    assert same(found, expected)


def test_a_scatter_waits_for_the_last_reader(place: Place) -> None:
    properties.check_arrives(place)
    case, pieces, _ = long_request(place)
    ended(place.gather(case.paged, case.block_ids.tolist(), pieces))
    expected = case.paged.clone()
    read = torch.empty_like(case.paged)
    case.paged.fill_(7.0)
    side = side_stream()
    torch.cuda.synchronize(DEVICE)
    with torch.cuda.stream(side):
        busy(50)
        read.copy_(case.paged)
    ticket = place.engine.scatter(
        properties.view_of(case.paged),
        case.block_ids.tolist(),
        pieces,
        place.pool,
        side.cuda_stream,
    )
    assert ticket is not None
    ended(ticket)
    side.synchronize()
    assert read.eq(7.0).all()
    assert torch.equal(case.paged, expected)


def test_torchs_default_stream_is_a_producer_too(place: Place) -> None:
    properties.check_arrives(place)
    case, pieces, slots = long_request(place)
    expected = case.gathered(slots=False)
    values = case.paged.clone()
    case.paged.zero_()
    torch.cuda.synchronize(DEVICE)
    busy(50)
    case.paged.copy_(values)
    ended(place.gather(case.paged, case.block_ids.tolist(), pieces, 0))
    found = place.read(slots, case.length, case.paged.size(3), torch.bfloat16)
    assert same(found, expected)


def test_a_cancelled_transfer_fails_and_others_go_on(way: str) -> None:
    properties.check_cancel(DEVICE, **WAYS[way])


def test_closing_ends_every_ticket(way: str) -> None:
    properties.check_close_with_work_in_flight(DEVICE, lambda: busy(20), **WAYS[way])
