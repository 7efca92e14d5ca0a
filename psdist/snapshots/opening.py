"""Open the storage that a path or URL names.

A local directory is ``psdist.snapshots.local``. Buckets and memory use obstore (``psdist.snapshots.bucket``), which is
imported only for them.
"""

from __future__ import annotations

import os
import re
from typing import Final
from urllib.parse import unquote, urlsplit

from psdist.errors import ConfigurationError
from psdist.snapshots.storage import Storage

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_BUCKETS: Final = ("s3", "gs", "az", "memory")


def open_storage(path_or_url: str) -> Storage:
    """Return the storage in a local directory, or at a URL.

    path_or_url: a path, ``file://``, ``s3://``, ``gs://``, ``az://`` or ``memory://``.

    Nothing is read or written yet; the first write creates a directory. Buckets take their settings from the
    environment (``AWS_*``, ``GOOGLE_*``, ``AZURE_*``). ``memory://NAME`` exists only in this process. Raises
    ConfigurationError.
    """
    if not path_or_url or "\0" in path_or_url:
        raise ConfigurationError(f"the storage {path_or_url!r:.80} is neither a directory nor a URL")
    if not _SCHEME.match(path_or_url):
        return _local(path_or_url)
    parts = urlsplit(path_or_url)
    if parts.scheme == "file" and parts.netloc in ("", "localhost") and parts.path:
        return _local(unquote(parts.path))
    if parts.scheme not in _BUCKETS:
        known = ", ".join(f"{scheme}://" for scheme in ("file", *_BUCKETS))
        raise ConfigurationError(
            f"the storage {path_or_url!r:.200} cannot be used: name a directory, or one of {known}"
        )
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise ConfigurationError(
            "the URL of a storage has a bucket and a path only: set credentials and options in the environment"
        )
    from psdist.snapshots.bucket import open_bucket

    return open_bucket(path_or_url.rstrip("/"))


def _local(path: str) -> Storage:
    from psdist.snapshots.local import LocalStorage

    return LocalStorage(os.path.expanduser(path))
