"""Destinations of metrics. A script registers a ``Tracker`` by ``context.add_tracker``; the launcher creates its own.

``TensorBoardTracker`` writes event files (extra ``tensorboard``), ``JsonLinesTracker`` lines of JSON. Scripts import
them from ``psdist.trackers``.
"""
