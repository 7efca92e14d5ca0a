"""Public names of ``psdist.metrics.trackers``: the tracker interface, and the trackers that write files."""

from __future__ import annotations

from psdist.metrics.trackers import JsonLinesTracker, TensorBoardTracker, Tracker

__all__ = ["JsonLinesTracker", "TensorBoardTracker", "Tracker"]
