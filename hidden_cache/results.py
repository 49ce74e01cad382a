"""`Results`: the tensors that a store answers with, in recycled memory or in the pool itself."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence

import torch

from hidden_cache import _native


class Results:
    """Makes result tensors without the cost of fresh memory, whose page faults exceed the copy.

    Thread-safe. After a fork all but tensors that were there raise RuntimeError in the child.
    """

    def __init__(self, max_bytes: int) -> None:
        """
        Args:
            max_bytes: of memory that is recycled, whether a tensor has it or it waits for the next
                one. 0 recycles none.

        Raises:
            ValueError: `max_bytes` is negative.
        """
        self._pool = _native.ResultPool(max_bytes)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A CPU tensor whose elements are yet to be written: `torch.empty`, but recycled.

        Its memory is free for the next one when the tensor and all views of it are gone, numpy's
        included. Where those that are kept leave no room below the limit it is fresh and goes back
        to the system, and `stats` counts a fallback.

        Raises:
            MemoryError: the system has no memory.
        """
        count = math.prod(shape)
        if count == 0:  # torch has no tensor of an empty buffer
            return torch.empty(tuple(shape), dtype=dtype)
        num_bytes = count * dtype.itemsize
        # Not torch.empty, whose small pages cost more than the copy.
        buffer = self._pool.take(num_bytes) or _native.fresh_result(num_bytes)
        return torch.frombuffer(buffer, dtype=dtype, count=count).view(tuple(shape))

    def view(
        self,
        pool: _native.SlotPool,
        slot: int,
        shape: Sequence[int],
        dtype: torch.dtype,
        on_death: Callable[[], object],
    ) -> torch.Tensor:
        """What lies in the pool from a slot on, as a tensor: takes the same time at any size.

        The tensor must not be written to: torch has none that refuses, and these are the rows that
        all others read. It must outlive what reads it later, such as a copy to a device with
        `non_blocking`. In a forked child it is the parent's memory, for as long as the parent keeps
        its rows there.

        Args:
            pool: kept alive with the tensor.
            slot: the first of neighbours that the caller keeps in place until `on_death`.
            shape: of the tensor; it may not be empty.
            dtype: of the elements as stored.
            on_death: called once, when the tensor and all views of it are gone, by whichever thread
                let the last one go; not at the end of the process, and not where this method
                raises. That may be in the midst of any other code, such as a garbage collection
                while the thread holds a lock: `on_death` takes no lock, but leaves word for those
                who hold it, as `collections.deque.append` does.

        Raises:
            IndexError: the shape is empty, the slot or the end of the shape is outside of the pool.
        """
        count = math.prod(shape)
        rows = _native.PoolRows(pool, slot, count * dtype.itemsize)
        tensor = torch.frombuffer(rows, dtype=dtype, count=count).view(tuple(shape))
        # Tensors that live to the end of the process keep their rows until then.
        weakref.finalize(rows, on_death).atexit = False
        return tensor

    def stats(self) -> _native.ResultPoolStats:
        """Of the recycled memory, and how often there was some."""
        return self._pool.stats()
