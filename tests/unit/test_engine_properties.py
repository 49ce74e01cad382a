"""What tests/gpu asks of the transfer engine, asked of it in host memory."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from tests import engine_properties as properties
from tests.engine_properties import WAYS, Place

ROUNDS = 1_000


@pytest.fixture(params=WAYS)
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    place = Place("cpu", **WAYS[request.param])
    yield place
    place.close()


def test_gathers(place: Place) -> None:
    for seed in range(ROUNDS):
        properties.check_gather(place, random.Random(seed))


def test_copies_of_rows_and_scatters(place: Place) -> None:
    for seed in range(ROUNDS):
        properties.check_scatter(place, random.Random(seed))


def test_long_requests_arrive(place: Place) -> None:
    properties.check_arrives(place)


def test_rows_may_be_reused_once_a_ticket_has_ended(place: Place) -> None:
    properties.check_rows_may_be_reused(place)


def test_a_cancelled_transfer_fails_and_others_go_on() -> None:
    properties.check_cancel("cpu")


def test_closing_ends_every_ticket() -> None:
    properties.check_close_with_work_in_flight("cpu")


def test_a_store_gives_back_what_it_took() -> None:
    properties.check_store("cpu")
