"""The process group of torch.distributed whose collectives travel through psdist's servers, for frameworks.

Frameworks divide data, gather metrics and wait for each other through torch.distributed. With this group they do so
without a second network: the workers are those of the run, and none is connected to another.
"""

from __future__ import annotations

from psdist.process_group.frameworks import mark_iteration, refuse, save_run
from psdist.process_group.group import BACKEND, broadcast_value, is_launched, open_collectives, start
from psdist.process_group.reconfigurable import ReconfigurableGroup
from psdist.torch_backend import register

__all__ = [
    "BACKEND", "ReconfigurableGroup", "broadcast_value", "is_launched", "mark_iteration", "open_collectives", "refuse",
    "save_run", "start",
]  # fmt: skip

register()
