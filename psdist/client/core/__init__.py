"""The client's pure parts: partitioning, buckets, routes, and the numbers of pushes."""
