"""Measurements of psdist and of its alternatives. Each module is run as ``python -m benchmarks.NAME``."""
