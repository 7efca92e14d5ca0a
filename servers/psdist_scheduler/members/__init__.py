"""Members of the run: registration, leases, ranks, barriers."""
