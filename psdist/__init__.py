"""psdist: training through sharded parameter servers.

The names a script uses, loaded when they are first used, so that ``import psdist`` costs nothing. ``psdist.init()``
gives a launched script its ``Context``; ``psdist.Client()`` is the connection alone. In a launched script the import
installs the exception hook of ``psdist.client.process.tracebacks``; in others ``init()`` does.

The import turns gRPC's fork handlers off, unless the environment says otherwise. While gRPC's threads are busy, those
handlers crash a forked child now and then (grpcio 1.85: 3 of 40 forks), and a script may fork, for a data loader say. A
forked child cannot use psdist and gets an error (``psdist.client.process.loop``), but it does not die. gRPC reads the
setting when it is imported, so a script that imports grpc itself imports psdist before. Likewise gRPC's own log
is off: it tells of each connection that a peer closes, and what goes wrong comes back as a status, in psdist's words.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

__version__: Final = "0.1.0"

os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

if TYPE_CHECKING:
    from psdist import compression, consistency, data, errors, optim
    from psdist.client.async_client import AsyncClient
    from psdist.client.bucket_step import AsyncBucket
    from psdist.client.context import Context, init
    from psdist.client.datasets import AsyncDataset, Dataset
    from psdist.client.parameters import AsyncParameters
    from psdist.client.snapshots import SnapshotInfo
    from psdist.client.steps import Statistics
    from psdist.client.sync_client import Bucket, Client, Parameters
    from psdist.consistency import ASP, BSP, SSP
    from psdist.errors import PsdistError
    from psdist.snapshots.load import load_snapshot

#: The module of each name, or the module that it names.
_MODULES: Final = {
    **{name: f"psdist.{name}" for name in ("compression", "consistency", "data", "errors", "optim")},
    **dict.fromkeys(("ASP", "BSP", "SSP"), "psdist.consistency"),
    **dict.fromkeys(("Bucket", "Client", "Parameters"), "psdist.client.sync_client"),
    **dict.fromkeys(("AsyncDataset", "Dataset"), "psdist.client.datasets"),
    **dict.fromkeys(("Context", "init"), "psdist.client.context"),
    "AsyncBucket": "psdist.client.bucket_step",
    "AsyncClient": "psdist.client.async_client",
    "AsyncParameters": "psdist.client.parameters",
    "PsdistError": "psdist.errors",
    "SnapshotInfo": "psdist.client.snapshots",
    "Statistics": "psdist.client.steps",
    "load_snapshot": "psdist.snapshots.load",
}

__all__ = [
    "ASP", "BSP", "SSP", "AsyncBucket", "AsyncClient", "AsyncDataset", "AsyncParameters", "Bucket", "Client", "Context",
    "Dataset", "Parameters", "PsdistError", "SnapshotInfo", "Statistics", "__version__", "compression", "consistency",
    "data", "errors", "init", "load_snapshot", "optim",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Imports the module that has ``name``, and remembers what it offers."""
    if name not in _MODULES:
        raise AttributeError(f"module 'psdist' has no attribute {name!r}")
    module = import_module(_MODULES[name])
    globals()[name] = found = getattr(module, name, module)
    return found


def __dir__() -> list[str]:
    return sorted(__all__)


if "PSDIST_CONNECTED_FILE" in os.environ:
    import_module("psdist.client.process.tracebacks").install()
