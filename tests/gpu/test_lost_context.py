"""A context that is lost: every transfer gets an answer, and closing ends. In a process of its own,
since nothing runs on the GPU in one that has lost its context."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.gpu import needs_gpu

pytestmark = needs_gpu

REPOSITORY = Path(__file__).parents[2]
LOSES_IT = """
import torch
from tests.engine_properties import Place, check_arrives, long_request

place = Place("cuda:0")
check_arrives(place)
case, pieces, _ = long_request(place)
torch.cuda.synchronize()
table = case.block_ids.tolist()
ids = torch.tensor([1 << 20], device="cuda:0")
torch.zeros(4, device="cuda:0")[ids]  # an assertion in the kernel takes the context
try:
    torch.cuda.synchronize()
    print("the context is not lost")
except RuntimeError:
    print("lost")
try:
    ticket = place.gather(case.paged, table, pieces, 0)
    assert ticket.wait(30.0), "no answer"
    print("answer:", ticket.error)
except RuntimeError as error:
    print("answer:", error)
place.engine.close()
print("closed")
"""


def test_a_lost_context_is_an_error_and_never_an_endless_wait() -> None:
    done = subprocess.run(
        [sys.executable, "-u", "-c", LOSES_IT],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=120,
    )
    lines = done.stdout.splitlines()
    assert lines[:1] == ["lost"], done.stdout + done.stderr
    assert lines[1].startswith("answer: cudaError"), done.stdout + done.stderr
    assert lines[-1] == "closed", done.stdout + done.stderr
