"""Snapshots: schedule, attempt in progress, waiting callers, catalog."""
