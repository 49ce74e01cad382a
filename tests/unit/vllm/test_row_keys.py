"""What sets requests with equal tokens apart, on vLLM's own block hashes, as its KV does."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import pytest
import torch

from hidden_cache.keys import BlockHashChunker

pytest.importorskip("vllm")

from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

HASH_BLOCK = 4
CHUNK = 8
TOKENS = 4 * CHUNK
IMAGE = (CHUNK + 1, 6)  # tokens of the placeholder: inside the second chunk


@pytest.fixture(autouse=True)
def hash_root() -> None:
    init_none_hash(sha256_cbor)


def keys(*, image: str | None = None, image_at: int = IMAGE[0], **changes: Any) -> list[Hashable]:
    """The keys of all chunks of a prompt that is the same but for `changes`."""
    features = [
        MultiModalFeatureSpec(
            data=None,
            modality="image",
            identifier=image,
            mm_position=PlaceholderRange(offset=image_at, length=IMAGE[1]),
        )
    ]
    arguments = {"prompt_token_ids": list(range(TOKENS)), **changes}
    request = Request(
        request_id="r",
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        mm_features=features if image is not None else None,
        block_hasher=get_request_block_hasher(HASH_BLOCK, sha256_cbor),
        **arguments,
    )
    chunks = BlockHashChunker(CHUNK, HASH_BLOCK, b"namespace").chunks(request.block_hashes, TOKENS)
    found = [chunk.key for chunk in chunks]
    assert None not in found
    return found


def lora(name: str, path: str) -> LoRARequest:
    return LoRARequest(lora_name=name, lora_int_id=1, lora_path=path)


def embeddings(value: float) -> torch.Tensor:
    return torch.full((TOKENS, 2), value)


PLAIN: dict[str, Any] = {}
ONE_LORA = {"lora_request": lora("a", "adapters/a")}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (PLAIN, {"cache_salt": "mine"}),
        ({"cache_salt": "mine"}, {"cache_salt": "theirs"}),
        (PLAIN, ONE_LORA),
        (ONE_LORA, {"lora_request": lora("b", "adapters/a")}),
        (ONE_LORA, {"lora_request": lora("a", "adapters/b")}),
        (ONE_LORA, {**ONE_LORA, "cache_salt": "mine"}),
        (
            {"prompt_token_ids": None, "prompt_embeds": embeddings(0.5)},
            {"prompt_token_ids": None, "prompt_embeds": embeddings(0.25)},
        ),
    ],
    ids=["salt", "salts", "lora", "lora names", "lora paths", "lora and salt", "embeddings"],
)
def test_no_chunk_is_shared(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert not set(keys(**one)) & set(keys(**other))


@pytest.mark.parametrize(
    "other",
    [{"image": None}, {"image": "another"}, {"image": "cat", "image_at": IMAGE[0] + 1}],
    ids=["no image", "another image", "another place"],
)
def test_chunks_from_an_image_on_are_not_shared(other: dict[str, Any]) -> None:
    """The tokens of the placeholders are the same; what they stand for is not."""
    one, another = keys(image="cat"), keys(**other)
    assert one[0] == another[0]
    assert not set(one[1:]) & set(another[1:])


@pytest.mark.parametrize(
    "same", [PLAIN, {"cache_salt": "mine"}, ONE_LORA, {"image": "cat"}], ids=str
)
def test_equal_requests_share_all_chunks(same: dict[str, Any]) -> None:
    assert keys(**same) == keys(**same)
