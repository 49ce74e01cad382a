"""The properties of the other tests on a real GPU: skipped, with the reason, where there is none.

They need torch, pytest and the package built, nothing else. HSCACHE_SEEDS sets how many random
cases each property is held to.
"""

from __future__ import annotations

import os

import pytest
import torch

from hidden_cache import _native

SEEDS = int(os.environ.get("HSCACHE_SEEDS", "2000"))
DEVICE = "cuda:0"


def _why_not() -> str:
    """Why nothing can run on a GPU here; empty where it can."""
    if not torch.cuda.is_available():
        build = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
        return f"no GPU: torch.cuda.is_available() is False (torch {torch.__version__}, {build})"
    why = _native.why_no_cuda()
    return f"no GPU for hidden_cache: {why}" if why else ""


needs_gpu = pytest.mark.skipif(bool(_why_not()), reason=_why_not() or "there is a GPU")


def busy(milliseconds: float) -> None:
    """Keeps torch's current stream busy: what is enqueued next runs late."""
    cycles = int(milliseconds * 2e6)  # of a clock of about 2 GHz
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]


def side_stream() -> torch.cuda.Stream:
    return torch.cuda.Stream(DEVICE)  # type: ignore[no-untyped-call]
