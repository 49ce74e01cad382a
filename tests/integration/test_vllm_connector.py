"""The connector on the real engine: every row as plain torch indexing reads it, bit for bit."""

from __future__ import annotations

import os
import random
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from hidden_cache import (
    SampleRefusedError,
    cleanup_hidden_states,
    load_hidden_states,
    read_metadata,
)
from tests.integration import engine
from tests.integration.checking import check_rows

pytestmark = pytest.mark.engine

BLOCK = 128  # tokens, on the CPU
CHUNK = 256


def tokens(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(engine.VOCABULARY), k=count)


def check(output: Any, *, expected_tokens: list[int] | None = None) -> dict[str, str]:
    """The sample of one output equals what was written down; returns its metadata."""
    path = engine.path_of(output)
    sample = load_hidden_states(path, timeout=30)
    prompt = expected_tokens or output.prompt_token_ids
    assert sample["token_ids"].tolist() == prompt
    assert sample["hidden_states"].shape == (len(prompt), len(engine.LAYER_IDS), 128)
    check_rows(path, sample["hidden_states"])
    return read_metadata(path)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return engine.make_tiny_model(tmp_path_factory.mktemp("tiny-model"))


class TestPrefixCachingAndChunkedPrefill:
    """Prefix caching on, 256 tokens a step: longer prompts take several steps."""

    @pytest.fixture(scope="class")
    @classmethod
    def samples(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return tmp_path_factory.mktemp("samples") / "made" / "by-the-connector"

    @pytest.fixture(scope="class")
    @classmethod
    def llm(cls, model: Path, samples: Path) -> Iterator[Any]:
        llm = engine.start(model, samples)
        yield llm
        engine.stop(llm)

    @pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, BLOCK + 1, CHUNK, CHUNK + 1, 1000])
    def test_prompt_lengths_around_a_block_and_a_chunk(self, llm: Any, length: int) -> None:
        (output,) = engine.generate(llm, [tokens(length, length)])
        check(output)

    def test_prompts_of_many_lengths_at_once(self, llm: Any) -> None:
        prompts = [tokens(100 + n, n) for n in (3, 128, 200, 300, 512, 513, 700, 900, 40, 256)]
        for output in engine.generate(llm, prompts):
            check(output)

    def test_a_shared_prefix_is_gathered_once(self, llm: Any) -> None:
        document = tokens(7, 3 * CHUNK + 17)
        first, *rest = [document + tokens(70 + n, 50) for n in range(4)]
        (output,) = engine.generate(llm, [first])
        assert check(output)["tokens_from_pool"] == "0"
        for output in engine.generate(llm, rest):
            assert check(output)["tokens_from_pool"] == str(3 * CHUNK)
            assert output.num_cached_tokens >= 3 * CHUNK - BLOCK

    def test_the_same_prompt_again_comes_from_the_pool(self, llm: Any) -> None:
        prompt = tokens(8, 2 * CHUNK)
        engine.generate(llm, [prompt])
        (output,) = engine.generate(llm, [prompt])
        assert check(output)["tokens_from_pool"] == str(2 * CHUNK)

    def test_output_tokens_are_included_but_for_the_last(self, llm: Any) -> None:
        prompt = tokens(9, 300)
        (output,) = engine.generate(llm, [prompt], max_tokens=20, include_output_tokens=True)
        generated = list(output.outputs[0].token_ids)
        assert len(generated) == 20
        check(output, expected_tokens=prompt + generated[:-1])

    def test_only_the_prompt_by_default(self, llm: Any) -> None:
        prompt = tokens(10, 130)
        (output,) = engine.generate(llm, [prompt], max_tokens=20)
        check(output, expected_tokens=prompt)

    def test_a_sample_is_private_complete_and_describes_itself(
        self, llm: Any, samples: Path
    ) -> None:
        (output,) = engine.generate(llm, [tokens(11, 140)])
        metadata = check(output)
        path = Path(output.kv_transfer_params["hidden_states_path"])
        assert path.parent == samples
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert metadata["layer_ids"] == ",".join(map(str, engine.LAYER_IDS))
        assert metadata["positions"] == "0:140"
        assert metadata["hscache_version"] == "1.0"
        assert not list(samples.glob(".*.tmp"))

    def test_vllms_own_loader_reads_it(self, llm: Any) -> None:
        from vllm.distributed.kv_transfer.kv_connector.v1 import example_hidden_states_connector

        (output,) = engine.generate(llm, [tokens(12, 200)])
        path = engine.path_of(output)
        theirs = example_hidden_states_connector.load_hidden_states(path)
        ours = load_hidden_states(path)
        assert theirs.keys() == ours.keys()
        assert all(torch.equal(theirs[name], ours[name]) for name in ours)
        cleanup_hidden_states(path)
        assert not os.path.exists(path)
        assert not os.path.exists(f"{path}.lock")

    def test_a_lost_folder_refuses_the_request_and_leaves_the_engine_alive(
        self, llm: Any, samples: Path
    ) -> None:
        moved = samples.with_name("moved-away")
        samples.rename(moved)
        try:
            (output,) = engine.generate(llm, [tokens(13, 300)])
            path = engine.path_of(output)
            with pytest.raises((FileNotFoundError, TimeoutError)):
                load_hidden_states(path, timeout=0.5)
        finally:
            moved.rename(samples)
        (output,) = engine.generate(llm, [tokens(14, 300)])
        check(output)


class TestTensorParallel:
    """Two ranks, prefix caching off: rank 0 writes, every rank lets go of every request."""

    @pytest.fixture(scope="class")
    @classmethod
    def llm(cls, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "0|1"
        try:
            llm = engine.start(
                model,
                tmp_path_factory.mktemp("samples"),
                tensor_parallel_size=2,
                enable_prefix_caching=False,
            )
        finally:
            del os.environ["VLLM_CPU_OMP_THREADS_BIND"]
        yield llm
        engine.stop(llm)

    def test_rows_of_prompts_around_a_block_and_in_several_steps(self, llm: Any) -> None:
        prompts = [tokens(200 + n, n) for n in (5, BLOCK, BLOCK + 1, 2 * CHUNK + 3, 1000)]
        for output in engine.generate(llm, prompts):
            check(output)

    def test_a_shared_prefix_is_gathered_once(self, llm: Any) -> None:
        document = tokens(20, 2 * CHUNK)
        engine.generate(llm, [document + tokens(21, 30)])
        (output,) = engine.generate(llm, [document + tokens(22, 30)])
        assert check(output)["tokens_from_pool"] == str(2 * CHUNK)

    def test_no_blocks_leak(self, llm: Any) -> None:
        """Held blocks come back on both ranks, or the next requests would wait for ever."""
        for n in range(5):
            for output in engine.generate(llm, [tokens(300 + 10 * n + i, 1500) for i in range(4)]):
                check(output)
        usage = {m.name: m for m in llm.get_metrics()}["vllm:kv_cache_usage_perc"].value
        assert usage < 12 / 455  # one leaked request's share of the engine's blocks


class TestPoolUnderPressure:
    """A pool of four chunks: long requests are refused with a reason, others wait their turn."""

    POOL_BYTES = 4 * CHUNK * len(engine.LAYER_IDS) * 128 * 2

    @pytest.fixture(scope="class")
    @classmethod
    def llm(cls, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
        samples = tmp_path_factory.mktemp("samples")
        llm = engine.start(model, samples, extra={"hscache_pool_bytes": cls.POOL_BYTES})
        yield llm
        engine.stop(llm)

    def test_a_request_larger_than_the_pool_is_refused_with_the_remedy(self, llm: Any) -> None:
        (output,) = engine.generate(llm, [tokens(400, 5 * CHUNK)])
        path = engine.path_of(output)
        with pytest.raises(SampleRefusedError, match="hscache_pool_bytes") as refused:
            load_hidden_states(path, timeout=30)
        assert refused.value.reason == "pool_full"

    def test_requests_that_fit_one_at_a_time_are_all_served(self, llm: Any) -> None:
        for output in engine.generate(llm, [tokens(410 + n, 3 * CHUNK + 5) for n in range(8)]):
            path = engine.path_of(output)
            sample = load_hidden_states(path, timeout=30)
            check_rows(path, sample["hidden_states"])


class TestRefusedStarts:
    """Configurations that cannot work end the start with a sentence that says what to do."""

    def start(
        self, model: Path, samples: Path, capfd: pytest.CaptureFixture[str], **changes: Any
    ) -> str:
        with pytest.raises((RuntimeError, ValueError)):
            engine.start(model, samples, **changes)
        captured = capfd.readouterr()
        return captured.out + captured.err

    def test_without_the_extraction_method(
        self, model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        printed = self.start(model, tmp_path, capfd, speculative_config=None)
        assert "needs 'extract_hidden_states'" in printed

    def test_into_a_folder_that_cannot_be_made(
        self, model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        (tmp_path / "file").write_text("not a folder")
        printed = self.start(model, tmp_path / "file" / "samples", capfd)
        assert "shared_storage_path" in printed
        assert "cannot be written" in printed

    def test_with_a_pool_larger_than_memory(
        self, model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        printed = self.start(model, tmp_path, capfd, extra={"hscache_pool_bytes": 1 << 60})
        assert "set hscache_pool_bytes lower" in printed
