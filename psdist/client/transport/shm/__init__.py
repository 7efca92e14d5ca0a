"""Shared-memory transport between a worker and the servers on its host."""
