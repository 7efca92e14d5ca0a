"""Snapshots: when one is due, the attempt under way, who waits, which exist."""
