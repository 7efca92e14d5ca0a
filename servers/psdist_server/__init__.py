"""The server: holds shards of the parameters and their optimizer state, and applies updates."""
