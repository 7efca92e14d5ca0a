"""Snapshots of a run: format, storage, and reading. docs/internals/snapshot-format.md specifies them.

``format`` is pure: dataclasses and their bytes. ``storage`` is a directory or a bucket. ``reader`` finds the committed
snapshots and reads them, verifying every byte. The scheduler and the servers write snapshots.
"""
