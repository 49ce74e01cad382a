"""The real engine with this project's connector: every prompt's hidden states become a file."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import hidden_cache
from demo import DemoError
from demo.folder import request_id
from demo.prompts import Prompt

# Inputs of layers 2, 15 and 27, and, as layer 30 of 30, the output of the last one.
LAYERS = (2, 15, 27, 30)
MAX_TOKENS = 16
# The longest prompt has about 1800 tokens; a step takes 512, so the documents come in chunks.
MAX_MODEL_LEN = 4096
STEP_TOKENS = 512
KV_CACHE_BYTES = 1 << 30
POOL_BYTES = 256 << 20
CHUNK_TOKENS = 256
# By then a file is there or something is broken: all it waits for is a disk.
FILE_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Sample:
    """One prompt's answer and the file with its hidden states."""

    prompt: Prompt
    token_ids: list[int]
    answer: str
    path: Path
    file_bytes: int
    row_bytes: int
    tokens_from_pool: int

    @property
    def bytes_from_pool(self) -> int:
        """Bytes of rows that were not gathered, because their chunk was in the pool already."""
        return self.row_bytes // len(self.token_ids) * self.tokens_from_pool


@dataclass(frozen=True, slots=True)
class Pass:
    """All prompts once; `seconds` from handing them in until the last file could be loaded."""

    number: int
    seconds: float
    samples: list[Sample]


class Engine:
    """A `vllm.LLM` that extracts LAYERS of `model` into files in `output`."""

    def __init__(self, model: Path, output: Path, dtype: str) -> None:
        from vllm import LLM

        self._llm: Any = LLM(
            model=str(model),
            dtype=dtype,
            seed=0,
            enforce_eager=True,  # starts sooner; nothing here runs long enough to win it back
            max_model_len=MAX_MODEL_LEN,
            max_num_batched_tokens=STEP_TOKENS,
            enable_prefix_caching=True,
            kv_cache_memory_bytes=KV_CACHE_BYTES,
            speculative_config={
                "method": "extract_hidden_states",
                "num_speculative_tokens": 1,
                "draft_model_config": {
                    "hf_config": {"eagle_aux_hidden_state_layer_ids": list(LAYERS)}
                },
            },
            kv_transfer_config={
                "kv_connector": "HiddenCacheConnector",
                "kv_connector_module_path": "hidden_cache.integrations.vllm",
                "kv_role": "kv_producer",
                "kv_connector_extra_config": {
                    "shared_storage_path": str(output),
                    "hscache_chunk_size": CHUNK_TOKENS,
                    "hscache_pool_bytes": POOL_BYTES,
                },
            },
        )

    def run(
        self, number: int, prompts: list[Prompt], finished: Callable[[Prompt, str], None]
    ) -> Pass:
        """Run all prompts as one batch, greedily; `finished` is told each answer as it comes.

        Raises DemoError if a prompt's hidden states do not come, with the reason that the
        connector left.
        """
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        sampling = SamplingParams(
            temperature=0.0, max_tokens=MAX_TOKENS, output_kind=RequestOutputKind.FINAL_ONLY
        )
        asked = {
            request_id(number, place, prompt.document): prompt
            for place, prompt in enumerate(prompts, start=1)
        }
        token_ids = {request: self._tokens(prompt) for request, prompt in asked.items()}

        engine = self._llm.llm_engine
        outputs: dict[str, Any] = {}
        start = time.perf_counter()
        # By hand what LLM.generate does, so that ids, and with them the files' names, are ours.
        inputs = engine.renderer.render_cmpl(
            [TokensPrompt(prompt_token_ids=tokens) for tokens in token_ids.values()]
        )
        for request, engine_input in zip(asked, inputs, strict=True):
            engine.add_request(request, engine_input, sampling)
        while engine.has_unfinished_requests():
            for output in engine.step():
                outputs[output.request_id] = output
                finished(asked[output.request_id], _answer(output))
        samples = [
            _sample(prompt, token_ids[request], outputs[request])
            for request, prompt in asked.items()
        ]
        return Pass(number, time.perf_counter() - start, samples)

    def _tokens(self, prompt: Prompt) -> list[int]:
        """The tokens of a prompt in the model's chat template."""
        return list(
            self._llm.get_tokenizer().apply_chat_template(
                [{"role": "user", "content": prompt.text}],
                add_generation_prompt=True,
                return_dict=False,
            )
        )

    def close(self) -> None:
        """End the engine's processes; the files stay."""
        # Not longer: every file is there by now.
        self._llm.llm_engine.engine_core.shutdown(timeout=5)


def _answer(output: Any) -> str:
    completion = output.outputs[0]
    text = " ".join(completion.text.split())
    return f"{text} …" if completion.finish_reason == "length" else text


def _sample(prompt: Prompt, token_ids: list[int], output: Any) -> Sample:
    path = Path(output.kv_transfer_params["hidden_states_path"])
    try:
        loaded = hidden_cache.load_hidden_states(path, timeout=FILE_TIMEOUT_S)
        metadata = hidden_cache.read_metadata(path)
    except (hidden_cache.HiddenCacheError, OSError) as error:
        raise DemoError(f"no hidden states for {prompt.question!r}: {error}") from error
    # The sample is whole: nobody needs its lock any more.
    hidden_cache.cleanup_hidden_states(path, keep_hidden_states=True)
    return Sample(
        prompt=prompt,
        token_ids=token_ids,
        answer=_answer(output),
        path=path,
        file_bytes=path.stat().st_size,
        row_bytes=loaded["hidden_states"].nbytes,
        tokens_from_pool=int(metadata["tokens_from_pool"]),
    )


def choose_dtype() -> tuple[str, str]:
    """The engine's dtype, and why.

    bfloat16 is what the weights are stored in, but processors without instructions for it multiply
    it many times more slowly than float32: it is tried out.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        if torch.bfloat16 in current_platform.supported_dtypes:
            return "bfloat16", f"{current_platform.device_name} supports it"
        return "float32", f"{current_platform.device_name} does not support bfloat16"
    slower = _seconds_to_multiply(torch.bfloat16) / _seconds_to_multiply(torch.float32)
    if slower > 1.5:
        return "float32", f"this processor multiplies bfloat16 {slower:.1f} times more slowly"
    return "bfloat16", "as the weights are stored"


def _seconds_to_multiply(dtype: torch.dtype) -> float:
    """The best of some trials at the size of one step's projection."""
    rows, weight = torch.ones(STEP_TOKENS, 576, dtype=dtype), torch.ones(1536, 576, dtype=dtype)
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        torch.nn.functional.linear(rows, weight)
        best = min(best, time.perf_counter() - start)
    return best
