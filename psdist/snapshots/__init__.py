"""Snapshots of a run: what they look like, where they lie, and how they are read. docs/snapshot-format.md says it in
MUSTs.

``format`` is pure: dataclasses and their bytes. ``storage`` is a directory or a bucket. ``reader`` finds what is
committed and reads it, checking every byte. Who takes snapshots, and when, is for the scheduler and the servers.
"""
