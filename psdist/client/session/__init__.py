"""Ties of a worker to its scheduler (membership, maps, waits, barriers, the end) and to its process (loop, signals)."""
