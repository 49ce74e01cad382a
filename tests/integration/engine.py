"""A small real engine: a random four-layer model, served by vLLM on the CPU."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from hidden_cache import cleanup_hidden_states, load_hidden_states

LAYER_IDS = (0, 1, 3, 4)
VOCABULARY = 512


def make_tiny_model(folder: Path) -> Path:
    """A Llama with random weights, large enough to have something to move."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        torch_dtype="bfloat16",
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def start(model: Path, samples: Path, **changes: Any) -> Any:
    """A `vllm.LLM` that extracts LAYER_IDS through the checking connector into `samples`.

    `changes` are arguments of `vllm.LLM`, but for `extra`: the connector's own settings.
    """
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ["VLLM_LOGGING_LEVEL"] = "WARNING"
    from vllm import LLM

    extra = {
        "shared_storage_path": str(samples),
        "hscache_pool_bytes": "256MiB",
        "hscache_chunk_size": 256,
        **changes.pop("extra", {}),
    }
    arguments: dict[str, Any] = {
        "model": str(model),
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "max_model_len": 2048,
        "max_num_batched_tokens": 256,
        "max_num_seqs": 8,
        "enable_prefix_caching": True,
        "disable_log_stats": False,
        "speculative_config": {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {
                "hf_config": {"eagle_aux_hidden_state_layer_ids": list(LAYER_IDS)}
            },
        },
        "kv_transfer_config": {
            "kv_connector": "CheckingConnector",
            "kv_connector_module_path": "tests.integration.checking",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": extra,
        },
        **changes,
    }
    llm = LLM(**arguments)
    # vLLM 0.32's attention ends the process on a processor with AMX, unless a matrix product of
    # some size came first and asked the kernel for the tiles.
    (output,) = generate(llm, [[1] * 64])
    load_hidden_states(path_of(output), timeout=30)
    cleanup_hidden_states(path_of(output))
    return llm


def generate(
    llm: Any, prompts: list[list[int]], *, max_tokens: int = 1, **kv_transfer_params: Any
) -> list[Any]:
    """Runs token prompts to the end, greedily; the outputs carry `kv_transfer_params`."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    sampling = SamplingParams(
        temperature=0.0,
        max_tokens=max_tokens,
        ignore_eos=True,
        detokenize=False,
        extra_args={"kv_transfer_params": kv_transfer_params} if kv_transfer_params else None,
    )
    return list(
        llm.generate([TokensPrompt(prompt_token_ids=p) for p in prompts], sampling, use_tqdm=False)
    )


def path_of(output: Any) -> str:
    """Where the sample of an output goes."""
    path: str = output.kv_transfer_params["hidden_states_path"]
    return path


def stop(llm: Any) -> None:
    """Ends the engine's processes."""
    llm.llm_engine.engine_core.shutdown()
