"""Shared memory between a worker and the servers on its host."""
