"""The scheduler: membership, placement and the life of parameters. Off the data's road."""
