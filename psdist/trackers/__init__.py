"""Destinations of metrics. A script registers a ``Tracker`` by ``context.add_tracker``; the launcher creates its own.

``TensorBoardTracker`` writes event files (extra ``tensorboard``), ``JsonLinesTracker`` lines of JSON.
"""

from __future__ import annotations

from psdist.trackers.json_lines import JsonLinesTracker
from psdist.trackers.tensorboard import TensorBoardTracker
from psdist.trackers.tracker import Tracker

__all__ = ["JsonLinesTracker", "TensorBoardTracker", "Tracker"]
