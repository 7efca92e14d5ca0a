"""A command's terminal: its streams, and bars that show progress."""
