"""KV that another connector brings back: rows of a prefix that was not computed this time."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from hidden_cache import SampleRefusedError, load_hidden_states
from tests.integration import encoding, engine

pytestmark = pytest.mark.engine

EXAMPLE = {"kv_connector": "ExampleConnector"}
KV_ONLY = {
    "kv_connector": "KvOnlyConnector",
    "kv_connector_module_path": "tests.integration.external_kv",
}

OTHERS = itertools.count(1000)  # seeds of prompts that no test asks about


def tokens(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(encoding.VOCABULARY), k=count)


def together(kv: Path, ours: dict[str, Any], other: dict[str, Any], *, first: bool) -> Any:
    """The `kv_transfer_config` of our connector and another one that keeps KV in a folder."""
    stored = {"shared_storage_path": str(kv)}
    other = {**other, "kv_role": "kv_both", "kv_connector_extra_config": stored}
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [ours, other] if first else [other, ours]},
    }


Start = Callable[..., Any]


@pytest.fixture(scope="class")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Starts a class's engine beside a KV connector, with prefix caching off: KV that was computed
    before comes from outside, and whole prompts in one step, as vLLM's example connector needs."""
    engines = []

    def start(
        other: dict[str, Any],
        *,
        block: int,
        first: bool,
        pool: str,
        with_rows: bool,
        caching: bool = False,
        **changes: Any,
    ) -> Any:
        samples, kv, model = (tmp_path_factory.mktemp(n) for n in ("samples", "kv", "model"))
        ours = encoding.hidden_cache_connector(
            samples,
            hscache_pool_bytes=pool,
            hscache_chunk_size=2 * block,
            hscache_rows_come_with_kv=with_rows,
        )
        llm = encoding.start(
            model,
            together(kv, ours, other, first=first),
            block_size=block,
            enable_prefix_caching=caching,
            max_num_batched_tokens=2048,
            **changes,
        )
        engines.append(llm)
        return llm

    yield start
    for llm in engines:
        engine.stop(llm)


class TestKvThatComesWithItsRows:
    """vLLM's `ExampleConnector` moves every layer, the one of the hidden states too."""

    BLOCK = 64

    @pytest.fixture(scope="class")
    @classmethod
    def llm(cls, start: Start) -> Any:
        return start(EXAMPLE, block=cls.BLOCK, first=True, pool="64MiB", with_rows=True)

    @pytest.mark.parametrize("length", [BLOCK, BLOCK + 2, 2 * BLOCK, 3 * BLOCK + 5, 1000])
    def test_rows_are_the_same_with_and_without_external_kv(self, llm: Any, length: int) -> None:
        prompt = tokens(length, length)
        brought_back = (length - 2) // self.BLOCK * self.BLOCK  # so it is in vLLM's connector
        for external in (0, brought_back):
            (output,) = engine.generate(llm, [prompt], max_tokens=5, include_output_tokens=True)
            assert output.num_cached_tokens == external
            generated = encoding.expected_output(prompt, 5)
            assert list(output.outputs[0].token_ids) == generated
            encoding.check_sample(engine.path_of(output), prompt + generated[:-1])


class KvOnly:
    """An engine beside a connector that moves only KV and is asked first, with little room."""

    BLOCK = 32
    CHUNK = 2 * BLOCK
    POOL_BYTES = 12 * CHUNK * len(encoding.LAYER_IDS) * encoding.HIDDEN * 4
    CACHING = False

    @pytest.fixture(scope="class")
    @classmethod
    def llm(cls, start: Start) -> Any:
        return start(
            KV_ONLY,
            block=cls.BLOCK,
            first=False,
            pool=str(cls.POOL_BYTES),
            with_rows=False,
            caching=cls.CACHING,
            num_gpu_blocks_override=40,
            max_model_len=1024,
        )


class TestKvThatComesWithoutItsRows(KvOnly):
    """A connector that moves only KV, asked first: the rows of what it brings were not computed.

    They are in the pool, or there is a reason instead of a sample; never whatever lies in the
    engine's blocks.
    """

    def run_others(self, llm: Any, count: int) -> None:
        """Other requests, whose rows then lie in the engine's blocks."""
        for _ in range(count):
            (output,) = engine.generate(llm, [tokens(next(OTHERS), 6 * self.CHUNK)])
            assert output.num_cached_tokens == 0

    def own_rows_or_a_reason(self, output: Any, prompt: list[int]) -> dict[str, str] | None:
        """The sample's metadata; None where a reason stands in its place."""
        refusal = None
        try:
            load_hidden_states(engine.path_of(output), timeout=30)
        except SampleRefusedError as error:
            refusal = error
        if refusal is None:
            return encoding.check_sample(engine.path_of(output), prompt)
        assert refusal.reason == "foreign_kv"
        return None

    def test_without_a_hit_the_rows_are_there(self, llm: Any) -> None:
        prompt = tokens(1, 3 * self.CHUNK + 7)
        (output,) = engine.generate(llm, [prompt])
        encoding.check_sample(engine.path_of(output), prompt)

    def test_a_prefix_whose_rows_are_all_in_the_pool(self, llm: Any) -> None:
        """The tail behind the last chunk is computed anew."""
        prompt = tokens(2, 3 * self.CHUNK + 7)
        engine.generate(llm, [prompt])
        (output,) = engine.generate(llm, [prompt])
        assert output.num_cached_tokens == 3 * self.CHUNK
        metadata = self.own_rows_or_a_reason(output, prompt)
        assert metadata is not None
        assert metadata["tokens_from_pool"] == str(3 * self.CHUNK)

    def test_a_prefix_whose_last_rows_were_never_in_the_pool(self, llm: Any) -> None:
        """More blocks come back than whole chunks."""
        prompt = tokens(3, 3 * self.CHUNK + self.BLOCK + 7)
        engine.generate(llm, [prompt])
        self.run_others(llm, 1)
        (output,) = engine.generate(llm, [prompt])
        assert output.num_cached_tokens == 3 * self.CHUNK + self.BLOCK
        assert self.own_rows_or_a_reason(output, prompt) is None

    def test_a_prefix_whose_rows_the_pool_has_let_go(self, llm: Any) -> None:
        prompt = tokens(4, 3 * self.CHUNK + 7)
        engine.generate(llm, [prompt])
        self.run_others(llm, 3)
        (output,) = engine.generate(llm, [prompt])
        assert output.num_cached_tokens == 3 * self.CHUNK
        self.own_rows_or_a_reason(output, prompt)

    def test_garbage_does_not_get_into_the_pool(self, llm: Any) -> None:
        """What is in the pool after such a hit is right for the request that comes then."""
        prompt = tokens(5, 3 * self.CHUNK + 7)
        engine.generate(llm, [prompt])
        self.run_others(llm, 3)
        engine.generate(llm, [prompt])
        longer = prompt + tokens(6, self.CHUNK)  # the KV connector knows whole prompts only
        (output,) = engine.generate(llm, [longer])
        assert output.num_cached_tokens == 0
        encoding.check_sample(engine.path_of(output), longer)


class TestBlocksThatCameWithoutTheirRows(KvOnly):
    """With prefix caching on the engine hands them on, as hits of its own."""

    CACHING = True

    def test_nobody_ever_gets_what_lies_in_them(self, llm: Any) -> None:
        prompt = tokens(4, 3 * self.CHUNK + 7)
        others = [tokens(next(OTHERS), 6 * self.CHUNK) for _ in range(3)]
        another = prompt[: 3 * self.CHUNK] + tokens(9, 40)
        # Computed, and let go by the engine and by the pool; then brought back, found in the
        # engine's cache by the same prompt, by one that goes on in another way; computed again.
        refused = []
        for asked in ([prompt], others, [prompt], [prompt], [another], others, [another]):
            for one in asked:
                (output,) = engine.generate(llm, [one])
                try:
                    load_hidden_states(engine.path_of(output), timeout=30)
                except SampleRefusedError as refusal:
                    refused.append(refusal.reason)
                else:
                    encoding.check_sample(engine.path_of(output), one)
        assert refused
        assert set(refused) == {"foreign_kv"}


class TestTensorParallel:
    """Two ranks beside another connector: who reports what decides whether blocks come back."""

    BLOCK = 128

    @pytest.fixture(scope="class")
    @classmethod
    def llm(cls, start: Start) -> Iterator[Any]:
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
            yield start(
                EXAMPLE,
                block=cls.BLOCK,
                first=True,
                pool="64MiB",
                with_rows=True,
                tensor_parallel_size=2,
            )

    def test_no_blocks_leak(self, llm: Any) -> None:
        """Both ranks let go of every request, one with KV of its own and one with external KV."""
        # Together they fit into one step, see `start`.
        prompts = [tokens(100 + n, 2 * self.BLOCK + 10 * n) for n in range(6)]
        for external in (False, True):
            for prompt, output in zip(prompts, engine.generate(llm, prompts), strict=True):
                assert (output.num_cached_tokens > 0) == external
                encoding.check_sample(engine.path_of(output), prompt)
        deadline = time.monotonic() + 60
        while not llm.reset_prefix_cache():  # refused as long as somebody holds a block
            assert time.monotonic() < deadline, "blocks are held for ever"
            time.sleep(0.1)

    def test_rows_come_back_on_both_ranks(self, llm: Any) -> None:
        prompt = tokens(50, 4 * self.BLOCK + 2)
        engine.generate(llm, [prompt])
        (output,) = engine.generate(llm, [prompt])
        assert output.num_cached_tokens == 4 * self.BLOCK
        encoding.check_sample(engine.path_of(output), prompt)
