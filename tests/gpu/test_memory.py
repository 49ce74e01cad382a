"""Device memory that a transfer takes: the staging ring's, however long the request is."""

from __future__ import annotations

import pytest
import torch

from tests.engine_properties import WAYS, Place, check_arrives, ended, long_request
from tests.gpu import DEVICE, needs_gpu

pytestmark = needs_gpu

# What the driver may take meanwhile for its own purposes; the request has 16 times as much.
TOLERANCE_BYTES = 16 << 20


def free_bytes() -> int:
    return int(torch.cuda.mem_get_info(DEVICE)[0])


@pytest.mark.parametrize("way", ["kernel", "copy engine"])
def test_a_long_request_takes_no_device_memory(way: str) -> None:
    place = Place(DEVICE, slot_bytes=1 << 20, num_slots=272, staging_bytes=4 << 20, **WAYS[way])
    check_arrives(place)
    case, pieces, _ = long_request(place, tokens=16 << 10, hidden=4096, layers=2)
    torch.cuda.synchronize(DEVICE)
    before = least = free_bytes()
    ticket = place.gather(case.paged, case.block_ids.tolist(), pieces)
    while not ticket.ended:
        least = min(least, free_bytes())
    ended(ticket)
    least = min(least, free_bytes())
    assert before - least <= TOLERANCE_BYTES
    place.close()
