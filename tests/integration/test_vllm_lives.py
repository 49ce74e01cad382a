"""What a request and its engine may go through, on the real engine, which dies in the end."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from hidden_cache import SampleRefusedError, load_hidden_states, read_metadata
from hidden_cache.integrations.vllm.options import ConnectorOptions
from hidden_cache.sample_file import lock_path
from tests.integration import engine

pytestmark = pytest.mark.engine

CHUNK = 256


def tokens(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(engine.VOCABULARY), k=count)


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("samples")


@pytest.fixture(scope="module")
def llm(samples: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    model = engine.make_tiny_model(tmp_path_factory.mktemp("tiny-model"))
    llm = engine.start(model, samples)
    yield llm
    engine.stop(llm)


def test_after_a_reset_for_new_weights_old_rows_answer_no_more(llm: Any) -> None:
    prompt = tokens(1, 2 * CHUNK + 30)
    from_pool: list[int] = []
    for epoch in ("0", "0", "1", "1"):
        if epoch == "1" and len(from_pool) == 2:
            assert llm.reset_prefix_cache(reset_connector=True)
        (output,) = engine.generate(llm, [prompt])
        load_hidden_states(engine.path_of(output), timeout=30)
        metadata = read_metadata(engine.path_of(output))
        assert metadata["weights_epoch"] == epoch
        from_pool.append(int(metadata["tokens_from_pool"]))
    assert from_pool == [0, 2 * CHUNK, 0, 2 * CHUNK]


def children_of(process: int) -> list[int]:
    """All processes below one."""
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat") as file:
                parent = int(file.read().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if parent == process:
            found += [int(name), *children_of(int(name))]
    return found


def holder_of(path: str) -> int:
    """The process that has a file open, under whatever name."""
    wanted = os.stat(path)
    for process in children_of(os.getpid()):
        folder = f"/proc/{process}/fd"
        for fd in os.listdir(folder):
            with contextlib.suppress(OSError):
                if os.path.samestat(os.stat(f"{folder}/{fd}"), wanted):
                    return process
    raise AssertionError(f"nobody has {path} open")


def test_who_waits_for_an_engine_that_is_killed_learns_it(llm: Any, samples: Path) -> None:
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    before = set(os.listdir(samples))
    sampling = SamplingParams(temperature=0.0, max_tokens=1500, ignore_eos=True, detokenize=False)
    for number in range(3):
        prompt = TokensPrompt(prompt_token_ids=tokens(50 + number, 300))
        llm.llm_engine.add_request(f"killed-{number}", prompt, sampling)
    deadline = time.monotonic() + 60
    while not (locks := [n for n in os.listdir(samples) if n not in before and "killed" in n]):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    paths = [str(samples / name.removesuffix(".lock")) for name in locks]
    worker = holder_of(lock_path(paths[0]))
    # As a kill in the middle of a write leaves it.
    os.kill(worker, signal.SIGKILL)
    for path in paths:
        with pytest.raises(SampleRefusedError) as refused:
            load_hidden_states(path, timeout=30)
        assert refused.value.reason == "writer_died"
        assert not os.path.exists(path)
    # The next start finds the folder in order.
    ConnectorOptions(str(samples)).check_storage()
    assert not [name for name in os.listdir(samples) if name.endswith(".tmp")]
