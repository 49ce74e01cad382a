"""A model for vLLM whose extracted rows say whose they are: every element is known in advance.

Row of layer L at position p: the token, p, then 62 sums over the whole prefix of numbers drawn from
each (token, position), all shifted by an offset of L. The sums come out of a real attention layer
over the engine's KV cache, so that a row also tells when KV of another prefix was used. The next
token is a function of the row, so that a test knows what is generated, too. All are whole numbers
that float32 holds exactly.

Each of vLLM's processes learns of the model by importing this module: the workers because it holds
their extension class, the test's own process because it calls `start`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models import ModelRegistry
from vllm.model_executor.models.interfaces import EagleModelMixin, SupportsEagle3

from hidden_cache import load_hidden_states, read_metadata
from tests.integration import engine

HIDDEN = 64
VOCABULARY = 512
LAYERS = 2
LAYER_IDS = (0, 1, 2)
_HEADS = 2
_LAYER_OFFSET = 1 << 16  # above every sum of the prompts that tests use
_NAME = "EncodingForCausalLM"


def marks(tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """`[n, HIDDEN]` int64 from -8 to 8: what each (token, position) adds to the prefix sums."""
    channels = torch.arange(1, HIDDEN + 1)
    mixed = (tokens.long() * 7919 + positions.long() * 104729 + 13)[:, None] * (2 * channels + 1)
    return (mixed + channels * 1299709) % 8191 % 17 - 8


def encode(tokens: torch.Tensor, positions: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
    """Rows `[n, HIDDEN]` float32 of layer 0."""
    rows = sums.float()
    rows[:, 0], rows[:, 1] = tokens, positions
    return rows


def next_tokens(rows: torch.Tensor) -> torch.Tensor:
    """`[n]` int64: what the model generates after each row of layer 0."""
    return (rows.long() * torch.arange(3, HIDDEN + 3)).sum(dim=1) % VOCABULARY


def expected_rows(tokens: list[int]) -> torch.Tensor:
    """`[tokens, len(LAYER_IDS), HIDDEN]` float32: the rows of a request, without the engine."""
    ids, positions = torch.tensor(tokens), torch.arange(len(tokens))
    rows = encode(ids, positions, marks(ids, positions).cumsum(dim=0))
    return torch.stack([rows + layer * _LAYER_OFFSET for layer in LAYER_IDS], dim=1)


def expected_output(prompt: list[int], count: int) -> list[int]:
    """The `count` tokens that the model generates after a prompt."""
    tokens = list(prompt)
    ids = torch.tensor(tokens)
    sums = marks(ids, torch.arange(len(tokens))).sum(dim=0, keepdim=True)
    for _ in range(count):
        here, position = torch.tensor(tokens[-1:]), torch.tensor([len(tokens) - 1])
        tokens.append(int(next_tokens(encode(here, position, sums))))
        sums = sums + marks(torch.tensor(tokens[-1:]), position + 1)
    return tokens[len(prompt) :]


class EncodingForCausalLM(nn.Module, EagleModelMixin, SupportsEagle3):  # type: ignore[misc]
    """It has no weights: attention with equal scores gives the mean of what the prefix holds."""

    aux_hidden_state_layers: tuple[int, ...]

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        heads = _HEADS // vllm_config.parallel_config.tensor_parallel_size
        self.heads = heads
        self.layers = nn.ModuleList(
            Attention(
                heads,
                HIDDEN,
                scale=1.0,
                num_kv_heads=heads,
                cache_config=vllm_config.cache_config,
                prefix=f"{prefix}.layers.{layer}.attn" if prefix else f"layers.{layer}.attn",
            )
            for layer in range(LAYERS)
        )

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("rows are made of token ids")

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, list[torch.Tensor]] | torch.Tensor:
        values = marks(input_ids, positions).float().repeat(1, self.heads)
        same = torch.zeros_like(values)
        # Each layer gives its share of the elements, so that the KV of each matters.
        means = torch.empty(len(values), HIDDEN)
        for share, layer in enumerate(self.layers):
            means[:, share::LAYERS] = layer(same, same, values)[:, share:HIDDEN:LAYERS]
        sums = (means * (positions + 1)[:, None]).round()
        rows = encode(input_ids, positions, sums)
        extracted = [rows + layer * _LAYER_OFFSET for layer in self.aux_hidden_state_layers]
        return (rows, extracted) if extracted else rows

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return 10 * nn.functional.one_hot(next_tokens(hidden_states), VOCABULARY).float()

    def load_weights(self, weights: Any) -> set[str]:
        return set()


ModelRegistry.register_model(_NAME, EncodingForCausalLM)


class Extension:
    """Adds nothing to a worker; its import has registered the model there."""


def hidden_cache_connector(samples: Path, **extra: Any) -> dict[str, Any]:
    """The `kv_transfer_config` of our connector, or one of a `MultiConnector`'s connectors."""
    return {
        "kv_connector": "HiddenCacheConnector",
        "kv_connector_module_path": "hidden_cache.integrations.vllm",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": str(samples), **extra},
    }


def start(folder: Path, kv_transfer_config: dict[str, Any], **changes: Any) -> Any:
    """A `vllm.LLM` of this model, whose configuration is written into `folder`."""
    config = {
        "architectures": [_NAME],
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _HEADS,
        "head_dim": HIDDEN,
        "max_position_embeddings": 4096,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    arguments: dict[str, Any] = {
        "load_format": "dummy",
        "dtype": "float32",
        "worker_extension_cls": f"{Extension.__module__}.{Extension.__qualname__}",
        "kv_transfer_config": kv_transfer_config,
        "speculative_config": {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {
                "hf_config": {"eagle_aux_hidden_state_layer_ids": list(LAYER_IDS)}
            },
        },
        **changes,
    }
    return engine.start(folder, folder, **arguments)


def check_sample(path: str, tokens: list[int]) -> dict[str, str]:
    """The sample at `path` holds these tokens' own rows; returns its metadata."""
    sample = load_hidden_states(path, timeout=30)
    assert sample["token_ids"].tolist() == tokens
    rows, expected = sample["hidden_states"], expected_rows(tokens)
    assert rows.shape == expected.shape
    wrong = (rows != expected).flatten(1).any(dim=1).nonzero().flatten().tolist()
    assert not wrong, (
        f"{path}: {len(wrong)} of {len(tokens)} rows are not this request's, from position "
        f"{wrong[0]} to {wrong[-1]}; the first one starts {rows[wrong[0], 0, :4].tolist()}"
    )
    return read_metadata(path)
