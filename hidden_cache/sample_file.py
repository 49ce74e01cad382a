"""One request's hidden states on disk, as safetensors.

A sample appears whole or not at all: it is written beside its place and renamed into it. While it
is being made a `.lock` file beside it is locked exclusively (flock), so that a reader sleeps until
the writer has published it, or has died. Where there is a reason instead of a sample it stands in
`.error`, published whole before the lock is released; where the folder takes no file any more, in
the lock's own file.

The file holds `token_ids [tokens]` int64 and `hidden_states [tokens, layers, hidden]`; its metadata
holds `hscache_version`, and model, layer ids, positions and weights epoch where they are known, and
`non_finite_rows` where the rows were looked at.
Format: https://github.com/huggingface/safetensors (8 bytes header length, JSON header, data).
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import resource
import struct
import time
import urllib.parse
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hidden_cache.atomic_files import claim, folder_of, is_temporary, published
from hidden_cache.errors import (
    DamagedSampleError,
    NonFiniteRowsError,
    SampleRefusedError,
    UnsupportedVersionError,
)
from hidden_cache.non_finite import count_non_finite

FORMAT_VERSION = "1.0"
SUFFIX = ".safetensors"
_MAX_NAME_BYTES = 200
_MAX_FILE_NAME = 255  # bytes
_POLL_S = 0.01
# What writers and the engine need beside the locks of live requests, at the least.
_FEWEST_SPARE_FILES = 32
_DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}


# --- names ----------------------------------------------------------------------------------


def sample_name(request_id: str) -> str:
    """The file name of a request's sample: one name inside any folder, whatever the id says.

    Characters other than letters, digits and `-_.~` are percent-encoded, as is a leading dot, and
    ids whose code is longer than 200 bytes are cut and get `=` and a hash; no id is `=`. Different
    ids have different names, and ordinary ids are unchanged.
    """
    name = urllib.parse.quote(request_id, safe="", errors="surrogatepass")
    if name.startswith("."):
        name = "%2E" + name[1:]
    # A code never holds "=", so that what follows is nobody else's name.
    if len(name) > _MAX_NAME_BYTES:
        digest = hashlib.sha256(name.encode()).hexdigest()[:32]
        name = f"{name[: _MAX_NAME_BYTES - len(digest) - 1]}={digest}"
    return (name or "=") + SUFFIX


def is_reserved(name: str) -> bool:
    """Whether a sample cannot have this file name: there must be room for what lies beside it, and
    it must not be what lies beside another."""
    return (
        len(os.fsencode(error_path(name))) > _MAX_FILE_NAME
        or name.endswith((lock_path(""), error_path("")))
        or is_temporary(name)
    )


def lock_path(path: str | Path) -> str:
    return f"{path}.lock"


def error_path(path: str | Path) -> str:
    return f"{path}.error"


# --- writing --------------------------------------------------------------------------------


class SampleLock:
    """The writer's exclusive lock on a sample to come. It dies with the process.

    Not thread-safe. It holds one file descriptor until it is released.
    """

    def __init__(self, path: str, root: str | None = None) -> None:
        """Takes the lock and clears away what an earlier request of that name left.

        Args:
            path: of the sample.
            root: as for `write_sample`.

        Raises:
            BlockingIOError: another writer holds it; nothing of it was touched.
            OSError: the folder does not allow it.
        """
        self.path = path
        self._root = root
        with folder_of(path, root) as (folder, name):
            self._fd = claim(folder, lock_path(name))
            try:
                for stale in (name, error_path(name)):
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(stale, dir_fd=folder)
            except OSError:
                self.release()
                raise

    @property
    def open_files_limit(self) -> int | None:
        """The most files that this process may have open, where this lock takes one that the
        process had better keep for other things; None where there are enough."""
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if limit == resource.RLIM_INFINITY:
            return None
        # The kernel gives the lowest number that is free: a high one means that those below are.
        return limit if self._fd >= limit - max(_FEWEST_SPARE_FILES, limit // 8) else None

    def refuse(self, request_id: str, reason: str, detail: str) -> None:
        """Tells whoever waits why there is no sample, and lets go. Does nothing once released.

        Raises:
            OSError: no file could be made for the reason. `load_hidden_states` finds it in the
                lock's own file then, where at least that could be written.
        """
        if self._fd < 0:
            return
        try:
            write_error(self.path, request_id, reason, detail, root=self._root)
        except OSError:
            with contextlib.suppress(OSError):
                _write_all(self._fd, _refusal_text(request_id, reason, detail))
            raise
        finally:
            self.release()

    def release(self) -> None:
        """Lets readers go on. Idempotent."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            try:
                # Closing is not enough where a child of this process has inherited the file.
                fcntl.flock(fd, fcntl.LOCK_UN)
            finally:
                os.close(fd)


def _write_all(fd: int, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    flat: Any = tensor.contiguous().view(torch.uint8).numpy().reshape(-1)
    return memoryview(flat)


@dataclass(frozen=True, slots=True)
class Written:
    """What `write_sample` has published.

    Attributes:
        size_bytes: of the file.
        non_finite_rows: rows with an infinity or a NaN; 0 where nobody looked.
    """

    size_bytes: int
    non_finite_rows: int


def write_sample(
    path: str,
    token_ids: torch.Tensor,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    pieces: Iterable[torch.Tensor],
    metadata: Mapping[str, str],
    *,
    non_finite: str = "allow",
    give_up: Callable[[], None] | None = None,
    root: str | None = None,
) -> Written:
    """Publishes a sample at `path` (mode 0600).

    Args:
        path: where; its folder must exist.
        token_ids: `[tokens]` int64 on the CPU; may be empty where a prompt had no ids.
        shape: `(tokens, layers, hidden)` of the hidden states.
        dtype: of the hidden states.
        pieces: the hidden states in order, each `[n, layers, hidden]`, together `tokens` rows. A
            piece is written before the next one is asked for, so that one buffer can serve all.
        metadata: strings for the file's metadata; `hscache_version` is added.
        non_finite: what becomes of a sample with rows (of one token and layer) that hold an
            infinity or a NaN. "refuse": it is not published; "mark": it is, and metadata has their
            number as `non_finite_rows`; "allow": nobody looks.
        give_up: called before each piece and before publishing; what it raises ends the write.
        root: a folder that `path` begins with: no link below it is followed and no file made
            outside it, missing folders below it are made.

    Raises:
        ValueError: pieces or token ids that do not make up the shape, a dtype that a sample does
            not take.
        NonFiniteRowsError: there are such rows, and they are to be refused.
        OSError: the disk or the folder does not take it.

    Whatever is raised, nothing is left behind, and what was at `path` stays.
    """
    if dtype not in _DTYPE_NAMES:
        raise ValueError(
            f"hidden states are {dtype}: a sample takes {sorted(_DTYPE_NAMES.values())}"
        )
    tokens, layers, hidden = shape
    if token_ids.numel() not in (0, tokens):
        raise ValueError(f"{token_ids.numel()} token ids for {tokens} tokens: pass all or none")
    ids_bytes = token_ids.numel() * 8
    total = tokens * layers * hidden * dtype.itemsize
    looks = non_finite != "allow"

    def header(non_finite_rows: int) -> bytes:
        found = {"non_finite_rows": str(non_finite_rows)} if looks else {}
        fields = {
            "__metadata__": {"hscache_version": FORMAT_VERSION, **metadata, **found},
            "token_ids": {
                "dtype": "I64",
                "shape": [token_ids.numel()],
                "data_offsets": [0, ids_bytes],
            },
            "hidden_states": {
                "dtype": _DTYPE_NAMES[dtype],
                "shape": list(shape),
                "data_offsets": [ids_bytes, ids_bytes + total],
            },
        }
        # A request id may hold half of a surrogate pair, which no reader of the format takes.
        return json.dumps(fields, ensure_ascii=False).encode(errors="replace")

    # Their number is known when all rows have passed: the header has room for any.
    room = len(header(tokens * layers))
    room += -room % 8
    written, bad_rows, first_bad = 0, 0, 0
    with published(path, root) as fd:
        _write_all(fd, struct.pack("<Q", room) + header(0).ljust(room))
        _write_all(fd, _bytes_of(token_ids.to(torch.int64)))
        for piece in pieces:
            if give_up is not None:
                give_up()
            if piece.dtype != dtype or tuple(piece.shape[1:]) != (layers, hidden):
                raise ValueError(
                    f"a piece is {list(piece.shape)} of {piece.dtype}, must be [n, {layers}, "
                    f"{hidden}] of {dtype}"
                )
            piece = piece.contiguous()
            if looks:
                count, first = count_non_finite(piece)
                if count and not bad_rows:
                    first_bad = written // (layers * hidden * dtype.itemsize) + first
                bad_rows += count
            if not bad_rows or non_finite == "mark":  # what is not published is only counted
                _write_all(fd, _bytes_of(piece))
            written += piece.numel() * dtype.itemsize
        if written != total:
            raise ValueError(f"the pieces are {written} bytes, must be {total} for {list(shape)}")
        if bad_rows and non_finite != "mark":
            raise NonFiniteRowsError(bad_rows, tokens * layers, first_bad)
        if bad_rows:
            os.lseek(fd, 8, os.SEEK_SET)
            _write_all(fd, header(bad_rows).ljust(room))
        if give_up is not None:
            give_up()
    return Written(8 + room + ids_bytes + total, bad_rows)


def write_error(
    path: str, request_id: str, reason: str, detail: str, *, root: str | None = None
) -> None:
    """Publishes why there is no sample at `path`. Raises OSError where the folder refuses it.

    `root` is as for `write_sample`.
    """
    with published(error_path(path), root) as fd:
        _write_all(fd, _refusal_text(request_id, reason, detail))


def _refusal_text(request_id: str, reason: str, detail: str) -> bytes:
    refusal = {"version": 1, "request_id": request_id, "reason": reason, "detail": detail}
    return json.dumps(refusal).encode()


# --- reading --------------------------------------------------------------------------------


def load_hidden_states(path: str | Path, timeout: float | None = None) -> dict[str, torch.Tensor]:
    """Loads a sample, waiting for its writer where there is one.

    Args:
        path: as handed out by the engine (`kv_transfer_params["hidden_states_path"]`).
        timeout: the most seconds to wait for a sample that is being written, or, where nothing is
            there yet, for one to appear. By default a writer is waited for as long as it lives,
            and a sample without a writer is not waited for.

    Returns:
        `hidden_states [tokens, layers, hidden]` and `token_ids [tokens]` (int64), on the CPU.

    Raises:
        SampleRefusedError: the writer gave a reason instead, or died.
        FileNotFoundError: neither sample nor writer is there.
        TimeoutError: not within `timeout`.
        UnsupportedVersionError: written by a newer major version.
        DamagedSampleError: the file is no sample, or not a whole one.
    """
    path = str(path)
    deadline = None if timeout is None else time.monotonic() + timeout
    while True:
        try:
            with open(lock_path(path)) as lock:
                _lock_shared(lock.fileno(), path, deadline)
                if _is_current(lock.fileno(), lock_path(path)):
                    try:
                        return _load(path)
                    except FileNotFoundError as error:
                        # A request that has come since takes away what was there before it.
                        if _is_current(lock.fileno(), lock_path(path)):
                            raise _told_by_lock(lock.fileno(), path) from error
        except FileNotFoundError:
            try:
                return _load(path)
            except FileNotFoundError:
                if deadline is None or time.monotonic() >= deadline:
                    raise
        time.sleep(_POLL_S)


def _lock_shared(fd: int, path: str, deadline: float | None) -> None:
    if deadline is None:
        fcntl.flock(fd, fcntl.LOCK_SH)
        return
    while True:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return
        if time.monotonic() >= deadline:
            raise TimeoutError(f"{path} is still being written: wait longer (timeout=)")
        time.sleep(_POLL_S)


def _is_current(fd: int, path: str) -> bool:
    """Whether the locked file is still the one of that name: another request may have come."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return True  # cleaned up beside us: the sample, if it is still there, is the one


def _load(path: str) -> dict[str, torch.Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    with contextlib.suppress(FileNotFoundError), open(error_path(path), "rb") as file:
        refusal = _parse_refusal(file.read())
        raise SampleRefusedError(path, *refusal)
    try:
        read_metadata(path)
        tensors: dict[str, torch.Tensor] = load_file(path)
        _check_sample(path, tensors)
        return tensors
    except SafetensorError as error:
        raise DamagedSampleError(f"{path} cannot be read: {error}: remove it") from error
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"{path}: neither a sample, nor a reason, nor a writer is there: check the path, or "
            "pass timeout= to wait for one to appear"
        ) from error


def _told_by_lock(fd: int, path: str) -> SampleRefusedError:
    """Why a lock was let go of with neither a sample nor a reason beside it."""
    text = os.pread(fd, 1 << 20, 0)
    if text:
        return SampleRefusedError(path, *_parse_refusal(text))
    return SampleRefusedError(
        path,
        "",
        "writer_died",
        "the writer let go of its lock without a sample or a reason: it was killed, or the disk "
        "took neither; the engine's log says more",
    )


def _check_sample(path: str, tensors: Mapping[str, torch.Tensor]) -> None:
    rows, ids = tensors.get("hidden_states"), tensors.get("token_ids")
    if (
        rows is None
        or ids is None
        or rows.dim() != 3
        or ids.dtype != torch.int64
        or ids.shape not in ((0,), (len(rows),))
    ):
        found = {name: (list(tensor.shape), str(tensor.dtype)) for name, tensor in tensors.items()}
        raise DamagedSampleError(
            f"{path} holds {found}, must hold hidden_states [tokens, layers, hidden] and token_ids "
            "[tokens] of torch.int64: is it a sample?"
        )


def _parse_refusal(text: bytes) -> tuple[str, str, str]:
    """Request id, reason and detail out of an error file that may hold anything."""
    try:
        refusal: Any = json.loads(text)
        return str(refusal["request_id"]), str(refusal["reason"]), str(refusal["detail"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return "", "unknown", "the error file beside it cannot be read"


def read_metadata(path: str | Path) -> dict[str, str]:
    """The metadata of a published sample; empty for files that other programs wrote without.

    Raises:
        FileNotFoundError: no such file.
        UnsupportedVersionError: written by a newer major version.
        DamagedSampleError: no safetensors file, or not a whole one.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="pt") as file:
            metadata: dict[str, str] = file.metadata() or {}
    except SafetensorError as error:
        raise DamagedSampleError(f"{path} cannot be read: {error}: remove it") from error
    version = metadata.get("hscache_version", FORMAT_VERSION)
    if version.split(".")[0] != FORMAT_VERSION.split(".")[0]:
        raise UnsupportedVersionError(
            f"{path} is of version {version}, this library reads {FORMAT_VERSION}: upgrade "
            "hidden_cache"
        )
    return metadata


def cleanup_hidden_states(
    path: str | Path, keep_hidden_states: bool = False, *, root: str | None = None
) -> None:
    """Removes a sample with its lock and error files; what is not there is no error.

    Args:
        path: of the sample.
        keep_hidden_states: leave the sample itself.
        root: as for `write_sample`.
    """
    with contextlib.suppress(FileNotFoundError), folder_of(str(path), root) as (folder, name):
        for doomed in (lock_path(name), error_path(name), name):
            if doomed != name or not keep_hidden_states:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(doomed, dir_fd=folder)
