"""Measurements of psdist against what else there is. Each module is run as ``python -m benchmarks.NAME``."""
