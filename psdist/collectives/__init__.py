"""Collectives between the workers of a run, for numpy arrays.

``Context.collectives`` is the group of all workers, ``Context.new_group`` makes others. docs/collectives.md has the
calls, and what is exact.
"""
