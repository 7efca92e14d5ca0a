"""Peers of psdist: each module is the worker process of one of them (see ``benchmarks.turns``)."""
