"""Pure parts of the client: the flat vector, buckets, encoders, routes, and the numbers of pushes."""
