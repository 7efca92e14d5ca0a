"""Parameters and their shards: creation, joins, replicas, scaling, and what they begin from."""
