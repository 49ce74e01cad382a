"""Files that appear whole or not at all, and names that one writer has for itself.

A file is written under a temporary name beside its place and renamed into it. Its writer holds a
lock (flock) on the temporary meanwhile: so a temporary without a lock is one whose writer was
killed, and whoever starts next removes it.

Every name is looked up in a folder that is held open, not along a path: what happens to the path
meanwhile changes nothing.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import os
import re
import secrets
import stat
import struct
import time
from collections.abc import Iterator

_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
_FILE = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
# The machine's boot, then what makes it unique.
_TEMPORARY = re.compile(r"\.hscache-([0-9a-f]{8})[0-9a-f]{8}\.tmp")
# Locks of another machine may not be seen here (NFS with `nolock` or `local_lock`): its temporaries
# are left alone until nobody can still be writing them.
_FOREIGN_AGE_S = 3600.0
# Each turn of a claim that has to begin again follows on what another writer achieved.
_MOST_TURNS = 1000


# --- folders --------------------------------------------------------------------------------


@contextlib.contextmanager
def folder_of(path: str, root: str | None = None) -> Iterator[tuple[int, str]]:
    """The folder of `path`, held open, and the name in it.

    Args:
        path: a file's.
        root: a folder that `path` begins with. No link below it is followed, whenever it was put
            there: it is an error, not a way out. Missing folders below it are made.

    Raises:
        OSError: no such folder, or none below `root`.
    """
    folder, name = os.path.split(path)
    parts: list[str] = []
    if root is not None:
        inside = os.path.relpath(folder, root)
        parts = [] if inside == "." else inside.split(os.sep)
        if os.pardir in parts:
            raise PermissionError(errno.EACCES, f"outside {root}", path)
        folder = root
    fd = os.open(folder or os.curdir, _FOLDER)
    try:
        for part in parts:
            below = _open_below(fd, part)
            os.close(fd)
            fd = below
        yield fd, name
    finally:
        os.close(fd)


def _open_below(folder: int, name: str) -> int:
    with contextlib.suppress(FileNotFoundError):
        return os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=folder)
    with contextlib.suppress(FileExistsError):
        os.mkdir(name, dir_fd=folder)
    return os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=folder)


def prepare_folder(folder: str, *, below: bool = False, within_s: float = 2.0) -> int:
    """Makes a folder, sees that it takes files, and removes what killed writers left in it.

    Temporaries of writers that live, in whatever process, stay. So do those that another machine
    wrote to within the last hour, whether or not its locks are seen here.

    Args:
        folder: its path.
        below: look through the folders below it too; links are not followed.
        within_s: the most seconds spent on looking; what is left then is for the next start.

    Returns:
        How many temporaries were removed.

    Raises:
        OSError: it cannot be made, or takes no files.
    """
    os.makedirs(folder, exist_ok=True)
    with folder_of(os.path.join(folder, "")) as (fd, _):
        probe, name = _make_temporary(fd, 0o600)
        now = os.fstat(probe).st_mtime  # by the clock that the files' times are of
        os.unlink(name, dir_fd=fd)
        os.close(probe)
    removed = 0
    give_up = time.monotonic() + within_s
    for where, _, names in os.walk(folder):
        for name in names:
            if time.monotonic() > give_up:
                return removed
            match = _TEMPORARY.fullmatch(name)
            if match is not None:
                younger_stay = 0.0 if match[1] == _this_boot() else _FOREIGN_AGE_S
                with contextlib.suppress(OSError), folder_of(os.path.join(where, name)) as (fd, _):
                    removed += _remove_if_dead(fd, name, now - younger_stay)
        if not below:
            break
    return removed


def _remove_if_dead(folder: int, name: str, not_after: float) -> bool:
    fd = os.open(name, _FILE | os.O_NONBLOCK, dir_fd=folder)
    try:
        # With this lock held a writer that has just made it will make itself another.
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        found = os.fstat(fd)
        dead = stat.S_ISREG(found.st_mode) and found.st_mtime <= not_after
        if dead and _is_named(fd, folder, name):
            os.unlink(name, dir_fd=folder)
            return True
        return False
    finally:
        os.close(fd)


# --- temporaries ----------------------------------------------------------------------------


@functools.cache
def _this_boot() -> str:
    """Eight digits for this machine since it started; containers on one machine share them."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read(8)
    except OSError:
        return secrets.token_hex(4)


def is_temporary(name: str) -> bool:
    """Whether a file of that name is taken for a temporary."""
    return _TEMPORARY.fullmatch(name) is not None


def _make_temporary(folder: int, mode: int) -> tuple[int, str]:
    """A new file, open and locked, and its name."""
    while True:
        name = f".hscache-{_this_boot()}{secrets.token_hex(4)}.tmp"
        fd = os.open(name, _FILE | os.O_CREAT | os.O_EXCL, mode, dir_fd=folder)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)  # somebody who starts took it for dead, and removes it
            continue
        except OSError:
            return fd, name  # no locks here: so nobody can take it for dead either
        if _is_named(fd, folder, name):
            return fd, name
        os.close(fd)


def _is_named(fd: int, folder: int, name: str) -> bool:
    """Whether the open file is the one of that name."""
    try:
        found = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(os.fstat(fd), found)


@contextlib.contextmanager
def published(path: str, root: str | None = None) -> Iterator[int]:
    """A file descriptor whose file (mode 0600) takes its place at `path` when the block ends well.

    Raises:
        OSError: the folder or the disk does not take it; nothing is left behind then.
    """
    with folder_of(path, root) as (folder, name):
        fd, temporary = _make_temporary(folder, 0o600)
        try:
            yield fd
            # Network file systems tell only at a close that a write failed; closing the file
            # itself would let go of its lock while it still has its temporary name.
            os.close(os.dup(fd))
            os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary, dir_fd=folder)
            raise
        finally:
            os.close(fd)


# --- claims ---------------------------------------------------------------------------------


def claim(folder: int, name: str) -> int:
    """Makes the file of that name this caller's alone: returns it open, empty, locked (flock).

    Of any number of callers at once, in any processes, one gets it, until it closes the file or
    dies. Who opens the file under its name never finds it unlocked before that. Those who hold a
    shared lock on it, readers of what was there before, are in nobody's way: it is replaced then,
    and they keep the old one.

    Args:
        folder: a folder held open.
        name: of a file in it; mode 0644 where it is made.

    Raises:
        BlockingIOError: somebody else has it.
        OSError: the folder does not allow it, or has no locks.
    """
    for _ in range(_MOST_TURNS):
        try:
            fd = os.open(name, _FILE, dir_fd=folder)
        except FileNotFoundError:
            fd = _claim_new(folder, name)
        else:
            fd = _claim_old(fd, folder, name)
        if fd >= 0:
            return fd
    raise BlockingIOError(errno.EAGAIN, "others claim it all the time", name)


def _claim_new(folder: int, name: str) -> int:
    """The file, where there was none; -1 where somebody was faster."""
    fd, temporary = _make_temporary(folder, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # it has it, or there are no locks here
        try:
            os.link(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
        except FileExistsError:
            os.close(fd)
            return -1
        except OSError:
            # Not every file system has links. This one is unlocked for a moment.
            os.close(fd)
            fd = -1
            with contextlib.suppress(FileExistsError):
                fd = os.open(name, _FILE | os.O_CREAT | os.O_EXCL, 0o644, dir_fd=folder)
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return fd
    except BaseException:
        with contextlib.suppress(OSError):
            os.close(fd)
        raise
    finally:
        with contextlib.suppress(OSError):
            os.unlink(temporary, dir_fd=folder)


def _claim_old(fd: int, folder: int, name: str) -> int:
    """The open file itself, or one in its place; -1 where another has come into its place."""
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            # A writer, who has it, or readers of what was there before.
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return _replace(fd, folder, name)
        if not _is_named(fd, folder, name):
            return -1
        os.ftruncate(fd, 0)
        mine, fd = fd, -1
        return mine
    finally:
        if fd >= 0:
            os.close(fd)


def _replace(old: int, folder: int, name: str) -> int:
    """A new file in the place of one that readers hold; -1 where that one is gone by now."""
    # One writer at a time: a record lock of this open file, which flocks do not see (but on NFS,
    # where both are one, and a name that is being read cannot be had again before).
    record = struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    fcntl.fcntl(old, fcntl.F_OFD_SETLK, record)
    if not _is_named(old, folder, name):
        return -1
    fd, temporary = _make_temporary(folder, 0o644)
    try:
        os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        os.close(fd)
        with contextlib.suppress(OSError):
            os.unlink(temporary, dir_fd=folder)
        raise
    return fd
