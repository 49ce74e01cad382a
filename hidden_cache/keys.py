"""Chunks and their keys: where a prefix is cut, and what each piece is called."""

from __future__ import annotations

import hashlib
import json
import os
from array import array
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from hidden_cache.errors import ConfigError

DEFAULT_CHUNK_SIZE = 256


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens `[start, end)` of a prefix.

    `key` identifies the chunk and everything before it; None is a chunk that is nobody else's and
    can neither be found nor shared.
    """

    start: int
    end: int
    key: Hashable | None


class Chunker(Protocol):
    """What cuts token ids into keyed chunks, such as `TokenChunker`."""

    @property
    def chunk_size(self) -> int: ...

    def chunks(self, token_ids: Any, /) -> list[Chunk]: ...


def chunker_for(token_database: Any) -> Chunker:
    """A token database of ours as it is, another one behind the same face.

    Raises:
        TypeError: an object that cuts no chunks.
    """
    if hasattr(token_database, "chunks"):
        return token_database  # type: ignore[no-any-return]
    if hasattr(token_database, "process_tokens"):
        return TokenDatabaseAdapter(token_database)
    raise TypeError(
        f"a token database is a {type(token_database).__name__}, must have chunks(token_ids) or "
        "process_tokens(tokens=token_ids)"
    )


def make_namespace(**identity: str | int) -> bytes:
    """A digest (16 bytes) of what makes equal tokens give equal rows: model, weights epoch, ..."""
    text = json.dumps(identity, sort_keys=True)
    return hashlib.sha256(text.encode()).digest()[:16]


class TokenChunker:
    """Keys for use without an engine: a SHA-256 chain over token ids, one link a chunk.

    Keys are stable: the same tokens, seed and salt give the same keys in every process.
    Thread-safe.
    """

    stable = True

    def __init__(
        self, chunk_size: int = DEFAULT_CHUNK_SIZE, *, seed: bytes = b"", salt: bytes = b""
    ) -> None:
        """`seed` and `salt` set apart what must not be shared: models, tenants."""
        if chunk_size < 1:
            raise ConfigError(f"chunk_size is {chunk_size}, must be at least 1 token")
        self.chunk_size = chunk_size
        # Lengths first, so that no two pairs of seed and salt run together to the same bytes.
        lengths = b"%d,%d;" % (len(seed), len(salt))
        self._root = hashlib.sha256(lengths + seed + salt).digest()

    def chunks(self, token_ids: Iterable[int]) -> list[Chunk]:
        """The whole chunks of a prefix, in order; a tail shorter than a chunk has none."""
        # A tensor gives its numbers at once; one by one each would be a tensor.
        tokens = array("q", token_ids.tolist() if hasattr(token_ids, "tolist") else token_ids)
        size = self.chunk_size
        key = self._root
        found = []
        for start in range(0, len(tokens) - size + 1, size):
            key = hashlib.sha256(key + tokens[start : start + size].tobytes()).digest()
            found.append(Chunk(start, start + size, key))
        return found


class BlockHashChunker:
    """Keys out of an engine's own block hashes, which form a chain already.

    vLLM hashes `hash_block_size` tokens at a time, and a hash covers all blocks before its own, the
    LoRA, the cache salt and the content of images. A chunk's key is the hash of its last block
    behind the namespace. Whether the keys are the same in another process is the engine's doing
    (vLLM: `PYTHONHASHSEED` or a cbor hash). Thread-safe.
    """

    def __init__(self, chunk_size: int, hash_block_size: int, namespace: bytes) -> None:
        if chunk_size < 1 or chunk_size % hash_block_size != 0:
            nearest = -(-max(chunk_size, 1) // hash_block_size) * hash_block_size
            raise ConfigError(
                f"hscache_chunk_size is {chunk_size}, must be a multiple of the engine's hash "
                f"block of {hash_block_size} tokens: set {nearest}"
            )
        self.chunk_size = chunk_size
        self._blocks = chunk_size // hash_block_size
        self._namespace = namespace

    @staticmethod
    def default_chunk_size(hash_block_size: int) -> int:
        """The default, or the next multiple of the hash block above it."""
        return -(-DEFAULT_CHUNK_SIZE // hash_block_size) * hash_block_size

    def chunks(self, block_hashes: Sequence[bytes], num_tokens: int) -> list[Chunk]:
        """Covers tokens `[0, num_tokens)` wholly: keyed chunks as far as there are hashes, then
        chunks without a key, the last of them perhaps short."""
        size = self.chunk_size
        found = []
        for start in range(0, num_tokens, size):
            end = min(start + size, num_tokens)
            last_block = end // size * self._blocks - 1
            keyed = end - start == size and last_block < len(block_hashes)
            key = self._namespace + bytes(block_hashes[last_block]) if keyed else None
            found.append(Chunk(start, end, key))
        return found


class TokenDatabaseAdapter:
    """LMCache's `TokenDatabase` as a chunker: the keys are its own, so KV and rows share them.

    A tail shorter than a chunk has a key where the database gives it one (`save_unfull_chunk`).
    Thread-safe, as the database is.
    """

    def __init__(self, token_database: Any) -> None:
        """Raises ConfigError for a database whose keys do not cover what stands before a chunk."""
        chunk_size = getattr(token_database, "chunk_size", None)
        if not isinstance(chunk_size, int) or chunk_size < 1:
            raise ConfigError(
                f"{type(token_database).__name__} has no chunk size: it cuts prompts at separators "
                "and keys the pieces alone, while hidden states depend on all tokens before them; "
                "set enable_blending to false"
            )
        self.chunk_size = chunk_size
        self._database = token_database

    @property
    def stable(self) -> bool:
        """Whether the keys are the same in every process.

        A SHA-256 is. Python's own hash and xxHash start from a random number, which
        PYTHONHASHSEED (a number, the same for all processes) sets.
        """
        function = getattr(getattr(self._database, "hash_func", None), "__name__", "")
        return function.startswith("sha256") or os.environ.get("PYTHONHASHSEED", "").isdigit()

    def chunks(self, token_ids: Any) -> list[Chunk]:
        """The chunks of a prefix, in order.

        Args:
            token_ids: a list or a 1-D integer tensor: the full prefix.
        """
        return [
            Chunk(start, end, key)
            for start, end, key in self._database.process_tokens(tokens=token_ids)
        ]
