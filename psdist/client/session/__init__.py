"""The worker's session with the scheduler: membership, the newest map, waits, barriers, and its agreed end."""
