"""Measurements of a run: metrics, spans and state, their trackers and exporter, and what the views derive from them."""
