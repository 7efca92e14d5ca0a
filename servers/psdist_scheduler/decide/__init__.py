"""The scheduler's decisions, as pure machines: members, losses, placement, snapshots, the end of a run."""
