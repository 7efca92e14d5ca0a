"""The process group of torch.distributed whose collectives travel through psdist's servers, for frameworks.

Frameworks divide data, gather metrics and wait for each other through torch.distributed. With this group they do so
without a second network: the workers are those of the run, and none is connected to another.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from psdist.client.context import Context
from psdist.errors import InvalidArgumentError, NoStorageError
from psdist.process_group.all_gather import broadcast_value
from psdist.process_group.group import BACKEND, is_launched, open_collectives, start
from psdist.process_group.reconfigurable import ReconfigurableGroup
from psdist.torch_backend import register

__all__ = [
    "BACKEND", "ReconfigurableGroup", "broadcast_value", "is_launched", "mark_iteration", "open_collectives", "refuse",
    "save_run", "start",
]  # fmt: skip

register()


def mark_iteration(context: Context) -> None:
    """Record that this worker is between two iterations: before a step, and after all that follows the one before.

    Collectives between two steps are steps of other parameter sets. They come irregularly, so psdist could not infer
    where an iteration starts.
    """
    with context.iteration():
        pass


def save_run(context: Context) -> bool:
    """Take a snapshot of the run at this step. All workers call it. Returns False if the run has no storage.

    Raises as ``Client.snapshot``.
    """
    mark_iteration(context)
    with suppress(NoStorageError):
        context.client.snapshot()
        return True
    return False


def refuse(found: Any, remedy: str) -> None:
    """Raise InvalidArgumentError with ``remedy`` if ``found`` is set."""
    if found:
        raise InvalidArgumentError(remedy)
