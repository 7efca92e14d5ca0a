"""The scheduler: membership, placement, parameter sets, snapshots. It is not on the data path."""
