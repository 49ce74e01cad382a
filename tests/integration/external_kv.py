"""A KV connector that knows nothing of hidden states, as most are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector

from hidden_cache.integrations.vllm.options import CACHE_LAYER_MARK


class KvOnlyConnector(ExampleConnector):  # type: ignore[misc]
    """vLLM's connector to a folder, but for the layer that holds the hidden states."""

    def start_load_kv(self, forward_context: Any, **keywords: Any) -> None:
        layers = forward_context.no_compile_layers
        carried = {name: layers[name] for name in layers if CACHE_LAYER_MARK not in name}
        super().start_load_kv(replace(forward_context, no_compile_layers=carried), **keywords)

    def save_kv_layer(self, layer_name: str, *arguments: Any, **keywords: Any) -> None:
        if CACHE_LAYER_MARK not in layer_name:
            super().save_kv_layer(layer_name, *arguments, **keywords)
