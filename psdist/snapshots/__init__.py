"""Snapshots of a run: their format, the storage they lie in, and how they are read.

Imports nothing by itself: a program loads obstore, numpy and rich only where it reads or writes a snapshot.
"""
