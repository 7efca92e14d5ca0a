"""psdist: training through sharded parameter servers.

The names a script uses, loaded when they are first used, so that ``import psdist`` costs nothing. ``psdist.init()``
gives a launched script its ``Context``; ``psdist.Client()`` is the connection alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

__version__: Final = "0.1.0"

__all__ = [
    "ASP",
    "BSP",
    "SSP",
    "AsyncClient",
    "AsyncParameters",
    "Client",
    "Context",
    "Parameters",
    "PsdistError",
    "__version__",
    "compression",
    "data",
    "errors",
    "init",
    "load_snapshot",
    "optim",
]

if TYPE_CHECKING:
    from psdist import compression, data, errors, optim
    from psdist.client.async_client import AsyncClient
    from psdist.client.context import Context, init
    from psdist.client.parameters import AsyncParameters
    from psdist.client.sync_client import Client, Parameters
    from psdist.consistency import ASP, BSP, SSP
    from psdist.errors import PsdistError
    from psdist.snapshots.load import load_snapshot


def __getattr__(name: str) -> Any:
    """Loads the module that has ``name``, and remembers what it offers."""
    match name:
        case "AsyncClient" | "AsyncParameters" | "Client" | "Parameters" | "Context" | "init":
            _load_client()
        case "ASP" | "BSP" | "SSP" | "PsdistError" | "errors" | "optim":
            _load_specifications()
        case "compression" | "data":
            _load_arrays()
        case "load_snapshot":
            _load_snapshots()
        case _:
            raise AttributeError(f"module 'psdist' has no attribute {name!r}")
    return globals()[name]


def __dir__() -> list[str]:
    return sorted(__all__)


def _load_client() -> None:
    from psdist.client.async_client import AsyncClient
    from psdist.client.context import Context, init
    from psdist.client.parameters import AsyncParameters
    from psdist.client.sync_client import Client, Parameters

    names = (AsyncClient, AsyncParameters, Client, Context, Parameters, init)
    globals().update({item.__name__: item for item in names})


def _load_specifications() -> None:
    import psdist.errors as errors
    import psdist.optim as optim
    from psdist.consistency import ASP, BSP, SSP

    globals().update(ASP=ASP, BSP=BSP, SSP=SSP, PsdistError=errors.PsdistError, errors=errors, optim=optim)


def _load_arrays() -> None:
    import psdist.compression as compression
    import psdist.data as data

    globals().update(compression=compression, data=data)


def _load_snapshots() -> None:
    from psdist.snapshots.load import load_snapshot

    globals().update(load_snapshot=load_snapshot)
