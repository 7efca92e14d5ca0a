"""Parameter sets and their shards: creation, joins, replicas, scaling, and the starting point of a run."""
