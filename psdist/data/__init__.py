"""Samples of a script: their assignment to workers, and batches of samples of different lengths.

The modules need neither torch, nor the network, nor psdist's client.
"""

from __future__ import annotations

from psdist.data.batcher import DynamicBatcher as DynamicBatcher
from psdist.data.batches import Batch as Batch
from psdist.data.samples import DistributedSampler as DistributedSampler
from psdist.data.samples import RangeOrder as RangeOrder
from psdist.types import DataPosition as DataPosition
from psdist.types import DatasetSpec as DatasetSpec
