"""Readers that are not ours: they wait for our samples, and read them."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hidden_cache.sample_file import SampleLock, lock_path, write_sample
from tests.threads import PATIENCE_S, Asking

pytestmark = pytest.mark.engine  # it takes ten seconds to load vLLM


def vllms_own(path: str) -> dict[str, torch.Tensor]:
    from vllm.distributed.kv_transfer.kv_connector.v1 import example_hidden_states_connector

    loaded: dict[str, torch.Tensor] = example_hidden_states_connector.load_hidden_states(path)
    return loaded


def like_hs_connectors(path: str) -> dict[str, torch.Tensor]:
    """As the file backend of hs-connectors: it opens the lock for writing, and asks for ten
    seconds."""
    with open(lock_path(path), "r+") as lock:
        deadline = time.monotonic() + 10
        while True:
            try:
                fcntl.flock(lock.fileno(), fcntl.LOCK_SH | fcntl.LOCK_NB)
                loaded: dict[str, torch.Tensor] = load_file(path)
                return loaded
            except BlockingIOError:
                assert time.monotonic() < deadline
                time.sleep(0.01)


def wait_for_opener(path: str) -> None:
    """Until a reader has opened the lock, which its writer has open already."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        opened = 0
        for fd in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                opened += os.path.samestat(os.fstat(int(fd)), os.stat(lock_path(path)))
        if opened > 1:
            return
        time.sleep(0.001)
    raise AssertionError("nobody waits")


@pytest.mark.parametrize("load", [vllms_own, like_hs_connectors])
@pytest.mark.parametrize("name", ["new", "used"])
def test_it_waits_for_a_sample_and_reads_it(
    load: Callable[[str], dict[str, torch.Tensor]], name: str, tmp_path: Path
) -> None:
    path = str(tmp_path / "request.safetensors")
    rows = torch.randn(7, 2, 3)
    ids = torch.arange(7) + 100

    def publish(rows: torch.Tensor) -> None:
        write_sample(path, ids, (7, 2, 3), rows.dtype, torch.split(rows, 2), {}, non_finite="mark")

    if name == "used":  # by an earlier request
        SampleLock(path).release()
        publish(rows + 1)
    lock = SampleLock(path)
    reader = Asking(load, path)
    wait_for_opener(path)
    assert reader.is_alive()
    publish(rows)
    assert reader.is_alive(), "it is still locked"
    lock.release()
    sample = reader.answer()
    assert sample.keys() == {"hidden_states", "token_ids"}
    assert torch.equal(sample["hidden_states"], rows)
    assert torch.equal(sample["token_ids"], ids)


@pytest.mark.parametrize("load", [vllms_own, like_hs_connectors])
def test_it_finds_no_file_where_there_is_a_reason(
    load: Callable[[str], dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    path = str(tmp_path / "request.safetensors")
    lock = SampleLock(path)
    reader = Asking(load, path)
    wait_for_opener(path)
    lock.refuse("r", "deadline", "why")
    with pytest.raises(FileNotFoundError):
        reader.answer()
