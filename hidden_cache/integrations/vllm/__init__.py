"""The vLLM connector, to be named in a `kv_transfer_config`:

{"kv_connector": "HiddenCacheConnector",
 "kv_connector_module_path": "hidden_cache.integrations.vllm",
 "kv_role": "kv_producer",
 "kv_connector_extra_config": {"shared_storage_path": "/data/hidden-states"}}
"""

from hidden_cache.integrations.vllm.connector import HiddenCacheConnector

__all__ = ["HiddenCacheConnector"]
