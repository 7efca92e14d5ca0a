"""Public names of ``psdist.monitoring.trackers``: the tracker interface, and the trackers that write files."""

from __future__ import annotations

from psdist.monitoring.trackers import JsonLinesTracker, TensorBoardTracker, Tracker

__all__ = ["JsonLinesTracker", "TensorBoardTracker", "Tracker"]
