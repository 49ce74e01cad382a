"""Samples on disk: what looking for infinities and NaNs costs beside the write.

A sample is written in pieces of 4 MiB, as the vLLM connector does, without looking and looking. The
floor is plain `write` of the same bytes into a new file. Beside it the look alone, and what torch
offers for it: `isfinite().all()`, and the smallest and largest number of a piece. Torch uses the
threads that it is given here. Nothing waits for the disk: files go as far as the page cache.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.core.bench import Bench
from benchmarks.core.measure import Contender
from hidden_cache.non_finite import count_non_finite
from hidden_cache.sample_file import write_sample

SAMPLE_BYTES = 128 << 20
PIECE_BYTES = 4 << 20
LAYERS = 4
HIDDEN = 4096


def run(bench: Bench) -> None:
    size = SAMPLE_BYTES // (8 if bench.quick else 1)
    bench.parameters |= {"piece_bytes": PIECE_BYTES, "layers": LAYERS, "hidden": HIDDEN}
    bench.touch(4 * size)
    with tempfile.TemporaryDirectory(prefix="hscache-bench-") as folder:
        groups = {
            f"{str(dtype).removeprefix('torch.')}, {size >> 20} MiB": dtype
            for dtype in (torch.bfloat16, torch.float32)
        }
        for name, dtype in bench.groups(groups):
            bench.measure(name, _contenders(os.path.join(folder, "sample"), size, dtype))


def _contenders(path: str, size: int, dtype: torch.dtype) -> list[Contender]:
    tokens = size // (LAYERS * HIDDEN * dtype.itemsize)
    rows = torch.randn(tokens, LAYERS, HIDDEN).to(dtype)
    pieces = torch.split(rows, PIECE_BYTES // (LAYERS * HIDDEN * dtype.itemsize))
    ids = torch.arange(tokens)

    def plain() -> None:
        fd = os.open(f"{path}.new", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        for piece in pieces:
            data: Any = piece.view(torch.uint8).numpy().reshape(-1)
            os.write(fd, data)
        os.close(fd)
        os.rename(f"{path}.new", path)

    def sample(non_finite: str) -> None:
        write_sample(path, ids, (tokens, LAYERS, HIDDEN), dtype, pieces, {}, non_finite=non_finite)

    def each(look: Callable[[torch.Tensor], object]) -> None:
        for piece in pieces:
            look(piece)

    return [
        Contender("write", plain, size),
        Contender("write_sample", partial(sample, "allow"), size, "write"),
        Contender("write_sample, looking", partial(sample, "refuse"), size, "write"),
        Contender("the look alone", partial(each, count_non_finite), size, "write"),
        Contender("torch.aminmax", partial(each, torch.aminmax), size, "write"),
        Contender("torch.isfinite", partial(each, lambda x: x.isfinite().all()), size, "write"),
    ]
