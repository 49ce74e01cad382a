"""The folder of the demo's files: whose it is, what they are called, and emptying it."""

from __future__ import annotations

import contextlib
import fcntl
import re
from collections.abc import Iterator
from pathlib import Path

from demo import DemoError

# The folder that has it is the demo's; any other is left alone.
MARK = ".hidden-cache-demo"
# All that comes of a request with an id as below: the engine appends to the id, the connector names
# the file after it, and beside it may lie a lock, a reason for a failure and a half-written file.
_OWN_FILE = re.compile(r"\.?demo-pass\d+-\d+-[a-z0-9-]+\.safetensors(\.lock|\.error)?[.0-9a-z]*")


def request_id(number: int, place: int, document: str) -> str:
    """The id of a pass's request, and the start of its file's name."""
    slug = re.sub(r"[^a-z0-9]+", "-", document.lower()).strip("-")
    return f"demo-pass{number}-{place:02}-{slug}"


@contextlib.contextmanager
def own_folder(output: Path) -> Iterator[None]:
    """Hold `output` for one demo at a time, emptied of the files that an earlier one left there.

    Raises DemoError for a folder that has something in it and is not marked as a demo's, for one
    that another demo is using, and for one that cannot be written.
    """
    mark = output / MARK
    with contextlib.ExitStack() as stack:
        try:
            output.mkdir(parents=True, exist_ok=True)
            if not mark.exists() and any(output.iterdir()):
                raise DemoError(
                    f"{output} has files in it and is not an earlier demo's: choose a new or "
                    "empty folder with --output"
                )
            held = stack.enter_context(mark.open("a"))
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for path in output.iterdir():
                if _OWN_FILE.fullmatch(path.name) and path.is_file():
                    path.unlink()
        except BlockingIOError:
            raise DemoError(
                f"another demo is writing to {output}: choose another folder with --output"
            ) from None
        except OSError as error:
            raise DemoError(
                f"cannot use {output}: {error}. Choose a folder that can be written with --output"
            ) from error
        yield
