"""The client library, which a worker's script uses."""
