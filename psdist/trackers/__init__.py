"""Where metrics go: a script registers a ``Tracker`` by ``context.add_tracker``, and the launcher has some of its own.

``TensorBoardTracker`` writes event files (extra ``tensorboard``), ``JsonLinesTracker`` lines of JSON.
"""

from __future__ import annotations

from psdist.trackers.json_lines import JsonLinesTracker
from psdist.trackers.tensorboard import TensorBoardTracker
from psdist.trackers.tracker import Tracker

__all__ = ["JsonLinesTracker", "TensorBoardTracker", "Tracker"]
