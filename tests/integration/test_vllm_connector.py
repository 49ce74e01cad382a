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

from hidden_cache import cleanup_hidden_states, load_hidden_states, read_metadata
from tests.integration import engine

pytestmark = pytest.mark.engine

BLOCK = 128  # tokens, on the CPU
CHUNK = 256


def tokens(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(engine.VOCABULARY), k=count)


def check(output: Any, *, expected_tokens: list[int] | None = None) -> dict[str, str]:
    """The sample of one output equals what was written down; returns its metadata."""
    path = output.kv_transfer_params["hidden_states_path"]
    sample = load_hidden_states(path, timeout=30)
    written_down = torch.load(f"{path}.expected")
    prompt = expected_tokens or output.prompt_token_ids
    assert sample["token_ids"].tolist() == prompt
    assert sample["hidden_states"].shape == (len(prompt), len(engine.LAYER_IDS), 128)
    assert torch.equal(sample["hidden_states"], written_down["rows"])
    metadata = read_metadata(path)
    assert int(metadata["tokens_from_pool"]) == written_down["from_pool"]
    return metadata


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return engine.make_tiny_model(tmp_path_factory.mktemp("tiny-model"))


class TestPrefixCachingAndChunkedPrefill:
    """Prefix caching on, 256 tokens a step: longer prompts take several steps."""

    @pytest.fixture(scope="class")
    def samples(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return tmp_path_factory.mktemp("samples") / "made" / "by-the-connector"

    @pytest.fixture(scope="class")
    def llm(self, model: Path, samples: Path) -> Iterator[Any]:
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
        path = output.kv_transfer_params["hidden_states_path"]
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
            path = output.kv_transfer_params["hidden_states_path"]
            with pytest.raises((FileNotFoundError, TimeoutError)):
                load_hidden_states(path, timeout=0.5)
        finally:
            moved.rename(samples)
        (output,) = engine.generate(llm, [tokens(14, 300)])
        check(output)
