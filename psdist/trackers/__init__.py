"""Public names of ``psdist.metrics.trackers``: the tracker interface, and the trackers that write files."""

from __future__ import annotations

from psdist.metrics.trackers.json_lines import JsonLinesTracker
from psdist.metrics.trackers.tensorboard import TensorBoardTracker
from psdist.metrics.trackers.tracker import Tracker

__all__ = ["JsonLinesTracker", "TensorBoardTracker", "Tracker"]
