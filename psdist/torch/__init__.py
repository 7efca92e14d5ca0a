"""PyTorch training through psdist. Needs the extra ``torch``.

``DistributedOptimizer`` trains a model on parameter servers in any consistency mode and replaces the script's
optimizer. ``DistributedDataParallel`` averages gradients through the servers for a script that keeps its own optimizer,
and ``ElasticDDP`` between workers that may die and join.
``offload`` trains a model that does not fit into a worker's memory. ``LeasedDataLoader`` feeds workers that come and
go. ``SyncBatchNorm`` normalizes over all workers' batches. ``import psdist`` alone never imports torch.
"""

from __future__ import annotations

try:
    import torch as _torch
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("psdist.torch needs PyTorch: pip install torch", name="torch") from error

from psdist.torch.conversion import convert_optimizer, convert_scheduler, load_optimizer_state
from psdist.torch.conversion import refuse_in_torch as _refuse_in_torch
from psdist.torch.data_parallel import DistributedDataParallel
from psdist.torch.elastic import ElasticDDP
from psdist.torch.leased_loader import LeasedDataLoader
from psdist.torch.local_steps import DiLoCo, LocalSGD
from psdist.torch.offloading import OffloadedOptimizer, offload
from psdist.torch.optimizer import DistributedOptimizer
from psdist.torch.sync_batch_norm import SyncBatchNorm

__all__ = [
    "DiLoCo",
    "DistributedDataParallel",
    "DistributedOptimizer",
    "ElasticDDP",
    "LeasedDataLoader",
    "LocalSGD",
    "OffloadedOptimizer",
    "SyncBatchNorm",
    "convert_optimizer",
    "convert_scheduler",
    "load_optimizer_state",
    "offload",
]

_refuse_in_torch()

del _torch, _refuse_in_torch
