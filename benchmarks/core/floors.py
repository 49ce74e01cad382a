"""Floors: the plainest way to move the same bytes on this machine, timed in the same rounds.

A floor is a contender like any other. It is measured beside what it bounds, never taken from an
earlier run: bandwidth on a shared machine changes by a factor of two within minutes.
"""

from __future__ import annotations

import ctypes

import torch

from benchmarks.core.measure import Contender


def host_copies(source: torch.Tensor) -> list[Contender]:
    """Copies of a contiguous host tensor into a new one: by one thread, then by torch's threads.

    The last of the list is the floor for work on torch's threads, which it shares: threads of its
    own would have to compete with torch's, which spin for some milliseconds after their work. Its
    result is new memory, as that of an operator is, so both are as warm.
    """
    nbytes = source.nbytes

    def memcpy() -> torch.Tensor:
        copied = torch.empty_like(source)
        ctypes.memmove(copied.data_ptr(), source.data_ptr(), nbytes)
        return copied

    def copy() -> torch.Tensor:
        return torch.empty_like(source).copy_(source)

    contenders = [Contender("memcpy, 1 thread", memcpy, bytes=nbytes)]
    if (threads := torch.get_num_threads()) > 1:
        contenders.append(Contender(f"plain copy, {threads} threads", copy, bytes=nbytes))
    return contenders
