"""numba's on-disk cache of one kernel: look an entry up, and tie it to the current sources.

numba checks only the file that defines the function. Code that a kernel calls in other files is compiled into it as
well. The cache key therefore includes a digest of all files beside it, and of the codecs' files. Otherwise a machine
with an old cache would compute differently from its peers.

This uses private names of numba. With a version that lacks them, numba's own rule stays in force.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

_CODECS: Final = Path(__file__).parent


def bind_to_sources(dispatcher: Any, function: Callable[..., Any]) -> None:
    """Restrict ``dispatcher``, which compiles ``function``, to cache entries compiled from the current files."""
    file: Any = getattr(getattr(dispatcher, "_cache", None), "_cache_file", None)
    if hasattr(file, "_source_stamp"):
        folder = Path(function.__code__.co_filename).parent
        file._source_stamp = (file._source_stamp, _digest(folder), _digest(_CODECS))


def holds(dispatcher: Any, signature: Any) -> bool:
    """True if the cache holds machine code of this signature for this processor and the current files."""
    cached = getattr(dispatcher, "_cache", None)
    file = getattr(cached, "_cache_file", None)
    if cached is None or file is None:
        return False
    key = cached._index_key(signature, dispatcher.targetctx.codegen())
    try:
        name = file._load_index().get(key)
    except (OSError, EOFError):  # Another process is removing it, or the disk was full.
        return False
    return name is not None and os.path.exists(file._data_path(name))


@cache
def _digest(folder: Path) -> bytes:
    """Return the digest of all Python files in a folder and its subfolders. Unreadable files are skipped."""
    found = blake2b(digest_size=16)
    for path in sorted(folder.rglob("*.py")):
        try:
            found.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes())
        except OSError:
            continue
    return found.digest()
