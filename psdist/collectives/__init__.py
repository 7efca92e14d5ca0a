"""Collectives between the workers of a run, for numpy arrays.

``Context.collectives`` is the group of all workers, ``Context.new_group`` makes others; both are a ``WorkerGroup``.
docs/collectives.md describes the calls and their exactness.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from psdist.collectives.group import AsyncWorkerGroup as AsyncWorkerGroup
    from psdist.collectives.sync_group import WorkerGroup as WorkerGroup

#: Default time limit of silence, in seconds: above the retransmission of a lost packet, which takes 0.2 s.
SILENCE_SECONDS: Final = 0.4
#: Module of each class. They are imported on first use: most scripts need none.
_MODULES: Final = {"AsyncWorkerGroup": "psdist.collectives.group", "WorkerGroup": "psdist.collectives.sync_group"}

__all__ = ["SILENCE_SECONDS", "AsyncWorkerGroup", "WorkerGroup"]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'psdist.collectives' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
