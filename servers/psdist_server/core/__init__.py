"""The server's pure machines: shards, replication, roles, and the cut of a snapshot."""
