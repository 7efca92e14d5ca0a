"""Protocols over all members: roll back, shut down, stop at one step, mutual waits."""
