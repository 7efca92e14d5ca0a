"""The scheduler: membership, placement, the life of parameter sets, snapshots. It is not on the data path."""
