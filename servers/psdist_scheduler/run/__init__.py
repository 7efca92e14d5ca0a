"""The scheduler's process: calls of members, the store, the snapshot storage, and reports about the run."""
