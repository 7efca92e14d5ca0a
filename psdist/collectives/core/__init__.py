"""Decisions of collectives, without connections: calls and their headers, data movement, reductions, and groups."""
