"""Ties of a client to its process: the background loop, signals, tracebacks, and the refusal to be copied."""
