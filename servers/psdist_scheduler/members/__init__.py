"""Who is in the run: membership, ranks, barriers."""
