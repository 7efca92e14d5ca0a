"""Key of a group, which all of its frames carry: digest of its name, its epoch, and digest of its members."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Final

from psdist.types import WorkerEntry

_DIGEST_BYTES: Final = 8
_EPOCH_BYTES: Final = 8


def make_key(name: str, epoch: int, members: Iterable[WorkerEntry]) -> bytes:
    """Return the key of a group. epoch: counts the groups of a name."""
    return _digest(name) + epoch.to_bytes(_EPOCH_BYTES, "big") + _digest(name_members(members))


def name_members(members: Iterable[WorkerEntry]) -> str:
    """Return the members, in order, as text."""
    return json.dumps([[worker.worker_id, worker.incarnation] for worker in members])


def series_of(key: bytes) -> bytes:
    """Return the part of a key that all groups of a name share."""
    return key[:_DIGEST_BYTES]


def epoch_of(key: bytes) -> int:
    """Return the epoch in a key."""
    return int.from_bytes(key[_DIGEST_BYTES : _DIGEST_BYTES + _EPOCH_BYTES], "big")


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=_DIGEST_BYTES).digest()
