"""Snapshots of a run: their format, their storage, and how they are read. docs/snapshot-format.md specifies them.

``format`` is pure: dataclasses and their bytes. ``storage`` is a directory or a bucket. ``reader`` finds the committed
snapshots and reads them, checking every byte. The scheduler and the servers take snapshots.
"""
