"""Chunks and their keys: where a prefix is cut, and what each piece is called."""

from __future__ import annotations

import ctypes
import hashlib
import json
import operator
import os
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from hidden_cache.errors import ConfigError

if TYPE_CHECKING:
    import torch

DEFAULT_CHUNK_SIZE = 256
TOKEN_BYTES = 8
# Tokens are packed in runs of about so many: all at once a long prompt takes fresh memory from the
# kernel each time, and that costs more than the hashing.
RUN_TOKENS = 8192


class Chunk(NamedTuple):
    """Tokens `[start, end)` of a prefix.

    `key` identifies the chunk and everything before it; None is a chunk that is nobody else's and
    can neither be found nor shared.
    """

    start: int
    end: int
    key: Hashable | None


class Placeholder(NamedTuple):
    """Tokens `[start, start + length)` that stand for content: an image, a piece of sound.

    All images have the same token ids, so it is `content_hash` that sets them apart: a digest of
    what the model sees, bytes or text (which counts as its UTF-8), not empty.
    """

    start: int
    length: int
    content_hash: str | bytes


class Chunker(Protocol):
    """What cuts token ids into keyed chunks, such as `TokenChunker`."""

    @property
    def chunk_size(self) -> int: ...

    @property
    def stable(self) -> bool:
        """Whether the keys are the same in every process, as what outlives this one needs."""

    @property
    def what_makes_stable(self) -> str:
        """The setting that does, for messages; empty where keys are always stable."""

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

    Keys are stable: the same tokens, seed, salt and placeholders give the same keys in every
    process. Thread-safe.
    """

    stable = True
    what_makes_stable = ""

    def __init__(
        self,
        chunk_size: int = DEFAULT_CHUNK_SIZE,
        *,
        seed: bytes = b"",
        salt: bytes = b"",
        save_unfull_chunk: bool = False,
    ) -> None:
        """
        Args:
            chunk_size: tokens in a chunk.
            seed, salt: set apart what must not be shared: models, tenants.
            save_unfull_chunk: gives a tail that is shorter than a chunk a key too, which no longer
                prefix finds.
        """
        if chunk_size < 1:
            raise ConfigError(f"chunk_size is {chunk_size}, must be at least 1 token")
        self.chunk_size = chunk_size
        self._save_unfull_chunk = save_unfull_chunk
        # Lengths first, so that no two pairs of seed and salt run together to the same bytes.
        lengths = b"%d,%d;" % (len(seed), len(salt))
        self._root = hashlib.sha256(lengths + seed + salt).digest()

    def chunks(
        self, token_ids: Iterable[int] | torch.Tensor, placeholders: Iterable[Placeholder] = ()
    ) -> list[Chunk]:
        """The whole chunks of a prefix, in order, and with `save_unfull_chunk` its tail.

        Chunks before the first placeholder have the keys that they have without any.

        Args:
            token_ids: of one prompt. A list, or a 1-D tensor of any integer dtype on any device,
                is read at once; another iterable number by number.
            placeholders: where tokens stand for other content, in any order.

        Raises:
            TypeError: a token id is no integer, or a content hash neither text nor bytes.
            ValueError: a tensor has not one dimension; placeholders overlap, are empty, have an
                empty hash, or lie outside of the tokens.
            OverflowError: a token id does not fit 64 bits.
        """
        tokens, pack = _readable(token_ids)
        size = self.chunk_size
        run = max(1, RUN_TOKENS // size) * size
        contents = _contents(placeholders, len(tokens), size)
        key = self._root
        found = []
        for first in range(0, len(tokens), run):
            stop = min(first + run, len(tokens))
            packed = pack(tokens, first, stop)
            whole = stop if self._save_unfull_chunk else stop - size + 1
            for start in range(first, whole, size):
                place = (start - first) * TOKEN_BYTES
                hashed = key + packed[place : place + size * TOKEN_BYTES]
                if start in contents:
                    hashed += contents[start]
                key = hashlib.sha256(hashed).digest()
                found.append(Chunk(start, min(start + size, stop), key))
        return found


def _readable(token_ids: Any) -> tuple[Any, Callable[[Any, int, int], bytes]]:
    """Token ids that can be read in runs, and what gives a run as little-endian int64."""
    if hasattr(token_ids, "data_ptr"):
        return _readable_tensor(token_ids)
    # Loaded when first needed: what only reads files does without native code.
    from hidden_cache._native import pack_tokens

    if isinstance(token_ids, list | tuple):
        return token_ids, pack_tokens
    # NumPy gives its numbers at once; one by one each would be an object of its own.
    return token_ids.tolist() if hasattr(token_ids, "tolist") else list(token_ids), pack_tokens


def _readable_tensor(token_ids: torch.Tensor) -> tuple[Any, Callable[[Any, int, int], bytes]]:
    import torch

    if token_ids.dim() != 1:
        raise ValueError(
            f"token_ids is a tensor of shape {list(token_ids.shape)}, must have one dimension: "
            "give one prompt at a time"
        )
    dtype = token_ids.dtype
    if dtype == torch.uint64:
        # As int64 a number from 2**63 on would become another, silently.
        return _readable(token_ids.tolist())
    odd = dtype.is_floating_point or dtype.is_complex or dtype == torch.bool
    # Without numbers any dtype will do: torch.tensor([]) is float.
    if odd and token_ids.numel() > 0:
        raise TypeError(
            f"token_ids is a tensor of {dtype}, must be of an integer dtype: give the token ids, "
            "not embeddings or a mask"
        )

    def pack(tokens: torch.Tensor, start: int, stop: int) -> bytes:
        run = tokens[start:stop].to(torch.int64).contiguous()
        return ctypes.string_at(run.data_ptr(), run.numel() * TOKEN_BYTES)

    return token_ids.cpu(), pack


def _contents(
    placeholders: Iterable[Placeholder], num_tokens: int, chunk_size: int
) -> dict[int, bytes]:
    """What placeholders add to the hashes of the chunks that they touch, by the chunk's start."""
    records: dict[int, bytes] = {}
    free = 0
    for start, length, content in sorted(map(_checked, placeholders)):
        end = start + length
        if start < 0 or end > num_tokens:
            raise ValueError(
                f"a placeholder covers tokens {start} to {end}, must lie within the {num_tokens} "
                "tokens given: give it with all of its tokens"
            )
        if start < free:
            raise ValueError(
                f"a placeholder covers tokens {start} to {end}, must start at {free} or behind, "
                "where the one before it ends: give each content tokens of its own"
            )
        free = end
        for chunk in range(start // chunk_size * chunk_size, end, chunk_size):
            # Numbers first, the length of the hash among them: no two lists of records are equal.
            record = b"%d,%d,%d;" % (start - chunk, length, len(content)) + content
            records[chunk] = records.get(chunk, b"") + record
    # 33 bytes, and tokens have 8 each: no tokens of a longer chunk are taken for them.
    return {chunk: b";" + hashlib.sha256(record).digest() for chunk, record in records.items()}


def _checked(placeholder: Placeholder) -> tuple[int, int, bytes]:
    start, length, content = placeholder
    start, length = operator.index(start), operator.index(length)
    if length < 1:
        raise ValueError(
            f"the placeholder at token {start} has {length} tokens, must have at least 1: leave it "
            "out"
        )
    if not isinstance(content, str | bytes):
        raise TypeError(
            f"the placeholder at token {start} has a content_hash of type "
            f"{type(content).__name__}, must be str or bytes: give a digest of its content"
        )
    if not content:
        raise ValueError(
            f"the placeholder at token {start} has an empty content_hash, must tell its content "
            "from all others: give a digest of it"
        )
    return start, length, content.encode() if isinstance(content, str) else content


def block_hashes_are_stable(hash_algo: str) -> bool:
    """Whether vLLM's block hashes are the same in every process with this environment.

    They start from a seed: PYTHONHASHSEED where it is set, else a constant for a SHA-256 and a
    random number for an xxHash (`resolve_none_hash_seed` of vLLM 0.32).

    Args:
        hash_algo: vLLM's `prefix_caching_hash_algo`.
    """
    return hash_algo.startswith("sha256") or "PYTHONHASHSEED" in os.environ


class BlockHashChunker:
    """Keys out of an engine's own block hashes, which form a chain already.

    vLLM hashes `hash_block_size` tokens at a time, and a hash covers all blocks before its own, the
    LoRA, the cache salt and the content of images. A chunk's key is the hash of its last block
    behind the namespace. Thread-safe.
    """

    what_makes_stable = (
        "set PYTHONHASHSEED to the same number for all processes, or vLLM's "
        "prefix_caching_hash_algo to sha256_cbor"
    )

    def __init__(
        self, chunk_size: int, hash_block_size: int, namespace: bytes, *, stable: bool = False
    ) -> None:
        """Raises ConfigError for chunks that are not made of whole hash blocks.

        Args:
            chunk_size: tokens in a chunk.
            hash_block_size: tokens in one of the engine's block hashes.
            namespace: prefix of all keys, as from `make_namespace`.
            stable: whether the engine's hashes are the same in every process, as
                `block_hashes_are_stable` tells of vLLM's.
        """
        if chunk_size < 1 or chunk_size % hash_block_size != 0:
            nearest = -(-max(chunk_size, 1) // hash_block_size) * hash_block_size
            raise ConfigError(
                f"hscache_chunk_size is {chunk_size}, must be a multiple of the engine's hash "
                f"block of {hash_block_size} tokens: set {nearest}"
            )
        self.chunk_size = chunk_size
        self.stable = stable
        self._blocks = chunk_size // hash_block_size
        self._namespace = namespace

    @staticmethod
    def default_chunk_size(hash_block_size: int) -> int:
        """The default, or the next multiple of the hash block above it."""
        return -(-DEFAULT_CHUNK_SIZE // hash_block_size) * hash_block_size

    def chunks(
        self, block_hashes: Sequence[bytes], num_tokens: int, *, first: int = 0
    ) -> list[Chunk]:
        """The whole chunks of tokens `[0, num_tokens)` that there are hashes for, in order.

        Leaves out the first `first` of them.
        """
        size = self.chunk_size
        count = min(num_tokens // size, len(block_hashes) // self._blocks)
        return [
            Chunk(
                place * size,
                (place + 1) * size,
                self._namespace + bytes(block_hashes[(place + 1) * self._blocks - 1]),
            )
            for place in range(first, count)
        ]


class TokenDatabaseAdapter:
    """LMCache's `TokenDatabase` as a chunker: the keys are its own, so KV and rows share them.

    A tail shorter than a chunk has a key where the database gives it one (`save_unfull_chunk`).
    Thread-safe, as the database is.
    """

    what_makes_stable = (
        "set PYTHONHASHSEED to the same number for all processes, or LMCache's "
        "pre_caching_hash_algorithm to sha256_cbor"
    )

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

        Those of a SHA-256 are. Python's own hash and xxHash start from a random number, which
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
