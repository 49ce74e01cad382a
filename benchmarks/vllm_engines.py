"""Real engines for `benchmarks/vllm.py`: they differ in what becomes of hidden states, only."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import hidden_cache
from benchmarks.core import memory
from benchmarks.core.errors import BenchmarkError
from demo.engine import CHUNK_TOKENS, LAYERS, MAX_MODEL_LEN, STEP_TOKENS
from demo.terminal import output_to

KV_CACHE_BYTES = 512 << 20
# Small, so that a run saves several times as much.
POOL_BYTES = 128 << 20
STAGING_BYTES = 64 << 20
WRITER_THREADS = 8
_FILE_TIMEOUT_S = 120.0
# vLLM's processes look for work without a pause for a second after the last they had, and would
# take a core from the engine whose turn is next.
_PAUSE_S = 1.25
_TIMED_STEP_TOKENS = CHUNK_TOKENS  # a whole chunk a step: so most steps have rows

Tokens = list[int]
Load = Callable[[str], dict[str, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class Kind:
    """What an engine does with hidden states: `connector` is "module.Class" or None.

    `extra` is the connector's own configuration, `load` the loader of its samples.
    """

    name: str
    connector: str | None = None
    extracts: bool = True
    extra: tuple[tuple[str, Any], ...] = ()
    load: Load | None = None
    step_tokens: int = STEP_TOKENS


def _load_ours(path: str) -> dict[str, torch.Tensor]:
    return hidden_cache.load_hidden_states(path, timeout=_FILE_TIMEOUT_S)


def _load_theirs(path: str) -> dict[str, torch.Tensor]:
    from vllm.distributed.kv_transfer.kv_connector.v1 import example_hidden_states_connector

    loaded: dict[str, torch.Tensor] = example_hidden_states_connector.load_hidden_states(path)
    return loaded


_OURS = (
    ("hscache_pool_bytes", POOL_BYTES),
    ("hscache_staging_bytes", STAGING_BYTES),
    ("hscache_chunk_size", CHUNK_TOKENS),
)
_THREADS = (("num_writer_threads", WRITER_THREADS),)

NONE = Kind("no extraction", extracts=False)
NOTHING = Kind("extraction, nothing saved", "benchmarks.vllm_connectors.SavesNothing")
OURS = Kind(
    "HiddenCacheConnector",
    "hidden_cache.integrations.vllm.HiddenCacheConnector",
    extra=_OURS + _THREADS,
    load=_load_ours,
)
THEIRS = Kind(
    "ExampleHiddenStatesConnector",
    "benchmarks.vllm_connectors.ExampleOnCpu",
    extra=_THREADS,
    load=_load_theirs,
)
TIMED = Kind(
    "HiddenCacheConnector, hooks timed",
    "benchmarks.vllm_connectors.Timed",
    extra=_OURS + _THREADS,
    load=_load_ours,
    step_tokens=_TIMED_STEP_TOKENS,
)


@dataclass(frozen=True, slots=True)
class Turn:
    """One batch of prompts: seconds from handing it in until all outputs were returned, and until
    all samples were loaded as well (the same where there are none)."""

    returned_s: float
    loaded_s: float
    row_bytes: int
    bytes_from_pool: int


class Engine:
    """A `vllm.LLM` of one kind, with a folder for its samples, which are removed after each turn.

    `worker` is the process that computes, and `before` its memory before the first prompt, without
    the pool.
    """

    def __init__(self, kind: Kind, model: Path, dtype: str, folder: Path) -> None:
        folder.mkdir()
        self.kind = kind
        self.folder = folder
        self._log = folder.with_name(f"{folder.name}.log")
        others = memory.descendants(os.getpid())
        try:
            with output_to(self._log):
                self._llm = _start(kind, model, dtype, folder)
        except Exception as error:
            lines = self._log.read_text(errors="replace").splitlines()
            causes = [line for line in lines if "Error" in line] or lines
            raise BenchmarkError(
                f"vLLM does not start ({kind.name}): {error}\n  " + "\n  ".join(causes[-8:])
            ) from error
        # The one with the weights and the cache.
        self.worker = max(
            memory.descendants(os.getpid()) - others,
            key=lambda pid: _bytes_or_none(pid, "VmRSS"),
        )
        memory.reset_peak(self.worker)
        # Pages of the pool are being backed by now, and are the only shared memory to speak of.
        self.before = memory.process_bytes(self.worker, "RssAnon", "RssFile")

    def run(self, prompts: list[Tokens], max_tokens: int = 1) -> Turn:
        """Runs a batch, loads every sample, and removes it. Raises BenchmarkError for a sample that
        is not what was asked for."""
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        sampling = SamplingParams(
            temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False
        )
        asked = [TokensPrompt(prompt_token_ids=tokens) for tokens in prompts]
        time.sleep(_PAUSE_S)
        start = time.perf_counter()
        outputs = self._llm.generate(asked, sampling, use_tqdm=False)
        returned_s = loaded_s = time.perf_counter() - start
        row_bytes = bytes_from_pool = 0
        if self.kind.load is not None:
            paths = [output.kv_transfer_params["hidden_states_path"] for output in outputs]
            samples = [self.kind.load(path) for path in paths]
            loaded_s = time.perf_counter() - start
            for path, tokens, sample in zip(paths, prompts, samples, strict=True):
                self._check(tokens, sample)
                row_bytes += sample["hidden_states"].nbytes
                bytes_from_pool += self._bytes_from_pool(path, sample["hidden_states"])
                hidden_cache.cleanup_hidden_states(path)
        return Turn(returned_s, loaded_s, row_bytes, bytes_from_pool)

    def _check(self, tokens: Tokens, sample: dict[str, torch.Tensor]) -> None:
        rows = sample["hidden_states"]
        if sample["token_ids"].tolist() != tokens or rows.shape[:2] != (len(tokens), len(LAYERS)):
            raise BenchmarkError(
                f"{self.kind.name}: a sample has {list(rows.shape)} rows and other token ids than "
                f"its prompt of {len(tokens)}"
            )

    def _bytes_from_pool(self, path: str, rows: torch.Tensor) -> int:
        if self.kind.load is not _load_ours:
            return 0
        pooled = int(hidden_cache.read_metadata(path)["tokens_from_pool"])
        return pooled * (rows.nbytes // len(rows))

    def grown(self) -> int:
        """The worker's peak of resident memory above what it had before the first prompt, the pool
        included."""
        return memory.process_bytes(self.worker, "VmHWM") - self.before

    def shared_bytes(self) -> int:
        """The worker's resident shared memory, which pages of the pool are."""
        return memory.process_bytes(self.worker, "RssShmem")

    def stop(self) -> None:
        """Ends its processes."""
        with output_to(self._log):
            self._llm.llm_engine.engine_core.shutdown(timeout=5)


class Engines:
    """Starts an engine when it is first asked for, and keeps it: one that idles costs little."""

    def __init__(self, model: Path, dtype: str, folder: Path, show: Callable[[str], None]) -> None:
        self._model = model
        self._dtype = dtype
        self._folder = folder
        self._show = show
        self.running: dict[str, Engine] = {}

    def get(self, kind: Kind) -> Engine:
        if kind.name not in self.running:
            self._show(f"starting vLLM: {kind.name}")
            folder = self._folder / f"engine-{len(self.running)}"
            self.running[kind.name] = Engine(kind, self._model, self._dtype, folder)
        return self.running[kind.name]

    def stop(self) -> None:
        self._show("stopping the engines")
        for engine in self.running.values():
            engine.stop()
        self.running.clear()


def draw_tokens(count: int, vocabulary: int, seed: str) -> Tokens:
    """So many tokens, drawn from a seed: what no engine has seen before."""
    return random.Random(seed).choices(range(vocabulary), k=count)


def _start(kind: Kind, model: Path, dtype: str, folder: Path) -> Any:
    from vllm import LLM

    arguments: dict[str, Any] = {}
    if kind.extracts:
        arguments["speculative_config"] = {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(LAYERS)}},
        }
    if kind.connector is not None:
        module, _, name = kind.connector.rpartition(".")
        arguments["kv_transfer_config"] = {
            "kv_connector": name,
            "kv_connector_module_path": module,
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"shared_storage_path": str(folder), **dict(kind.extra)},
        }
    return LLM(
        model=str(model),
        dtype=dtype,
        seed=0,
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=MAX_MODEL_LEN,
        max_num_batched_tokens=kind.step_tokens,
        enable_prefix_caching=True,
        kv_cache_memory_bytes=KV_CACHE_BYTES,
        **arguments,
    )


def _bytes_or_none(pid: int, field: str) -> int:
    try:
        return memory.process_bytes(pid, field)
    except (OSError, BenchmarkError):  # it has ended meanwhile
        return 0
