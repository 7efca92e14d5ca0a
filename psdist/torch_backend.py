"""Registration of the backend ``psdist`` with torch.distributed.

The package's entry point for ``torch.backends`` calls ``register`` when torch is imported, so this module must stay
tiny. The process group itself (``psdist.process_group.link_group``) is imported when a script asks for one.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, Final

NAME: Final = "psdist"


def register() -> None:
    """Make the backend known to torch, unless it is."""
    import torch.distributed as dist

    if dist.is_available() and NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, _make_group, extended_api=True, devices=["cpu"])


def _make_group(options: Any, backend_options: Any) -> Any:
    return import_module("psdist.process_group.link_group").make_group(options, backend_options)
