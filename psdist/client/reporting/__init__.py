"""Measurements and reports of a worker: the clock of its calls, and delivery of metrics to trackers and launcher."""
