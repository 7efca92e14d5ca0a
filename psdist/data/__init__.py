"""Samples of a script: their assignment to workers, and batches of samples of different lengths.

The modules need neither torch, nor the network, nor psdist's client.
"""

from __future__ import annotations

from psdist.data.assignment import DistributedSampler as DistributedSampler
from psdist.data.assignment import RangeOrder as RangeOrder
from psdist.data.batcher import DynamicBatcher as DynamicBatcher
from psdist.data.batches import Batch as Batch
from psdist.types import DataPosition as DataPosition
from psdist.types import DatasetSpec as DatasetSpec
