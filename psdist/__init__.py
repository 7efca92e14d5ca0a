"""psdist: training through sharded parameter servers.

These are the names that a script uses. They are loaded on first use, so ``import psdist`` costs nothing.
``psdist.init()`` returns the ``Context`` of a script; ``psdist.Client()`` is the connection alone. In a launched script
the import installs the exception hook of ``psdist.client.session.script``, which ``init()`` does in others, and the
choice of the exit status.

The import disables gRPC's fork handlers, unless the environment says otherwise. While gRPC's threads are busy, those
handlers occasionally crash a forked child (grpcio 1.85: 3 of 40 forks), and a script may fork, for example for a data
loader. A forked child cannot use psdist and gets an error (``psdist.client.session.loop``), but it survives. gRPC reads
the setting when it is imported, so a script that imports grpc itself must import psdist first; otherwise its first fork
is warned about (``psdist.client.session.loop``).

gRPC's own log is disabled, too. It reports every connection that a peer closes, while psdist reports errors in its own
words.
"""

from __future__ import annotations

import gc
import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from psdist.settings import grpc_settings as grpc_settings  # Before anything imports gRPC.
from psdist.version import __version__

if TYPE_CHECKING:
    from psdist import compression, consistency, data, errors, optim
    from psdist.client.async_client import AsyncClient
    from psdist.client.context import Context, init
    from psdist.client.datasets import AsyncDataset
    from psdist.client.parameters import AsyncParameters, Statistics
    from psdist.client.push import AsyncBucket
    from psdist.client.snapshots import SnapshotInfo
    from psdist.client.sync_client import Bucket, Client, Dataset, Parameters
    from psdist.consistency import ASP, BSP, SSP
    from psdist.errors import PsdistError
    from psdist.launcher.launch import LaunchResult, launch
    from psdist.monitoring.worker_reports import RunInfo
    from psdist.snapshots.load import load_snapshot

#: Module of each name, or the module that the name stands for.
_MODULES: Final = {
    **{name: f"psdist.{name}" for name in ("compression", "consistency", "data", "errors", "optim")},
    **dict.fromkeys(("ASP", "BSP", "SSP"), "psdist.consistency"),
    **dict.fromkeys(("Bucket", "Client", "Dataset", "Parameters"), "psdist.client.sync_client"),
    **dict.fromkeys(("Context", "init"), "psdist.client.context"),
    **dict.fromkeys(("LaunchResult", "launch"), "psdist.launcher.launch"),
    "AsyncBucket": "psdist.client.push",
    "AsyncClient": "psdist.client.async_client",
    "AsyncDataset": "psdist.client.datasets",
    "AsyncParameters": "psdist.client.parameters",
    "PsdistError": "psdist.errors",
    "RunInfo": "psdist.monitoring.worker_reports",
    "SnapshotInfo": "psdist.client.snapshots",
    "Statistics": "psdist.client.parameters",
    "load_snapshot": "psdist.snapshots.load",
}

__all__ = [
    "ASP", "BSP", "SSP", "AsyncBucket", "AsyncClient", "AsyncDataset", "AsyncParameters", "Bucket", "Client",
    "Context", "Dataset", "LaunchResult", "Parameters", "PsdistError", "RunInfo", "SnapshotInfo", "Statistics",
    "__version__", "compression", "consistency", "data", "errors", "init", "launch", "load_snapshot", "optim",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import the module that defines ``name``, and cache the object."""
    if name not in _MODULES:
        raise AttributeError(f"module 'psdist' has no attribute {name!r}", name=name, obj=sys.modules[__name__])
    collects = gc.isenabled()
    gc.disable()  # Imported objects stay alive: traversing them again and again would take a tenth of the import.
    try:
        module = import_module(_MODULES[name])
    finally:
        if collects:
            gc.enable()
    globals()[name] = found = getattr(module, name, module)
    return found


def __dir__() -> list[str]:
    return sorted(__all__)


if "PSDIST_CONNECTED_FILE" in os.environ:
    script = import_module("psdist.client.session.script")
    script.shorten_tracebacks()
    script.choose_exit_status()
