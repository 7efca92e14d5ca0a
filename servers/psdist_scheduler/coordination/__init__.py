"""Protocols over all members: rollback, shutdown, deadlocks, silent and unreachable members."""
