"""numba's cache of one kernel: what is in it, and whether it is of today's code.

numba looks at the file that a function is written in. What a kernel calls of other files is compiled into it, too. So
the digest of all files beside it, and of the codecs', belongs to what a cache must match. Without that a machine with
an old cache would have other arithmetic than its peers.

numba has no public names for this. Where a version of it has others, its own rule is left as it is.
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
    """Has ``dispatcher``, which compiles ``function``, use only what was compiled of today's files."""
    file: Any = getattr(getattr(dispatcher, "_cache", None), "_cache_file", None)
    if hasattr(file, "_source_stamp"):
        folder = Path(function.__code__.co_filename).parent
        file._source_stamp = (file._source_stamp, _digest(folder), _digest(_CODECS))


def holds(dispatcher: Any, signature: Any) -> bool:
    """Whether the cache has the machine code of this signature, for this processor and today's files."""
    cached = getattr(dispatcher, "_cache", None)
    file = getattr(cached, "_cache_file", None)
    if cached is None or file is None:
        return False
    key = cached._index_key(signature, dispatcher.targetctx.codegen())
    try:
        name = file._load_index().get(key)
    except (OSError, EOFError):  # another process removes it, or the disk was full
        return False
    return name is not None and os.path.exists(file._data_path(name))


@cache
def _digest(folder: Path) -> bytes:
    """The digest of all Python files in a folder and its folders. Those that cannot be read are left out."""
    found = blake2b(digest_size=16)
    for path in sorted(folder.rglob("*.py")):
        try:
            found.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes())
        except OSError:
            continue
    return found.digest()
