"""What ties a client to its process: the loop in the background, signals, tracebacks, and no copies."""
