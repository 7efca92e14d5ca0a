"""Data sets whose ranges are leased to workers."""
